"""Language models that draft level by level: what all of them share, wherever their caches are.

A pass over the last committed tokens gives the first level, and each further level costs a pass
over what was drafted: K levels cost K passes. A chain has one token a level (Leviathan et al.,
2023, arXiv 2211.17192); a tree has the most probable paths, as EAGLE-2 grows them (arXiv
2406.16858), whose passes over a few tokens hardly take longer. Both stop where the model is too
unsure for one more pass to pay, see `until_unsure`.
"""

from abc import abstractmethod
from collections import defaultdict
from functools import cache
from typing import ClassVar

import torch
from torch.nn.functional import pad

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.sampling import DRAFT_SUPPORT, RowRandom, Sampling, largest
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import UNMEASURED_ALPHA, Budget, TokenTree, TreeShape
from drafthead.heads.growing.dynamic import dynamic_tree
from drafthead.heads.growing.levels import (
    Guess,
    Level,
    Nodes,
    filled_tree,
    known_at_roots,
    levels_of,
)
from drafthead.heads.growing.static import chain_budgets
from drafthead.infer.drafters.until_unsure import OneDraft, Sureness

# Nodes of a tree for each level, and the most nodes of a level that get children.
NODES_A_LEVEL = (3, 8)
MOST_OPENED = 8


class LevelDrafter(Drafter):
    """Chains and trees of up to `depth` levels from a language model."""

    features = NO_FEATURES
    names = ("model",)
    sampling_rule = "traversal"

    def __init__(self, model: Target, target: Target, depth: int):
        """Raises UserError when depth is below 1."""
        if depth < 1:
            raise UserError(f"a draft model must draft at least 1 token, got {depth}")
        self.model = model
        self.depth = depth
        self.budgets = (*grown_budgets(depth), *chain_budgets(depth))
        # Models of one family may pad their vocabularies to different sizes.
        self.vocab_size = min(model.vocab_size, target.vocab_size)
        # By the nodes of a level, and whether they are guesses of draws.
        self.sureness: defaultdict[tuple[int, bool], Sureness] = defaultdict(Sureness)

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [..., S] of the S tokens that the target has as well, of all [..., V]."""
        return logits[..., : self.vocab_size]

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of tokens at places [...] among the S."""
        return places

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of proposed tokens [...]."""
        return tokens

    def __repr__(self) -> str:
        return f"{type(self.model).__name__} {self.model.config.to_json_string()}"

    def compile(self, target: Target) -> None:
        """Run the model's passes as the target's; on a CPU they multiply in int8."""
        if target.backend.records:
            self.model = self.model.recorded(target.backend.fuses)
        else:
            self.model = self.model.packed(in_int8=True)


class LevelSession(DraftSession):
    """A language model at work, which drafts level by level in a cache that it leaves as it was."""

    # Whether the roots are pending in the cache while they are drafted for, and not committed.
    roots_pending: ClassVar[bool] = False

    def __init__(self, drafter: LevelDrafter):
        self.drafter, self.model = drafter, drafter.model
        # A recorded model also looks here whether its weights have changed.
        self.cache = drafter.model.new_cache()
        self.roots: torch.Tensor | None = None  # [B] the last committed tokens
        self.draft: OneDraft | None = None  # that may stop early, until its tokens are judged
        self.levels = 0  # of the last draft

    @abstractmethod
    def _after_roots(self) -> torch.Tensor:
        """The logits [B, V] after the last committed tokens, once what is new has been read."""

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        first = self._guess(self._after_roots()[:, None])
        depth = min(budget.depth, self.drafter.depth)
        assert self.roots is not None
        if isinstance(random, RowRandom):
            given = *chain(depth, self.roots.device), self.roots, first.states
            expand = known_at_roots(first, self.expand)
            tree = filled_tree(*given, expand, sampling, random)
        else:
            self._begin_draft(budget, sampling, random)
            tree = self._grown(first, Budget(max(budget.nodes, depth + 1), depth), random)
        self.levels = tree.max_depth
        self.cache.discard()
        return tree

    def _begin_draft(self, budget: Budget, sampling: Sampling, draws: NextDraws | None) -> None:
        """Watch how sure the model is, where the budget asks for that and reading is free.

        Only under rules that follow the target's own tokens: under others the text depends on the
        tree, which must not depend on other rows, nor on what earlier drafts have taught.
        """
        follows = sampling.greedy or draws is not None
        if follows and budget.least_chance > 0 and self.model.device.type == "cpu":
            kind = (budget.nodes - 1) // budget.depth, draws is not None
            self.draft = OneDraft(self.drafter.sureness[kind], budget.least_chance)

    def _judge(self, committed: Committed) -> None:
        """Learn from what became of the last draft."""
        if self.draft is not None:
            self.draft.learn(self.levels, committed.counts)
            self.draft = None

    def _grown(self, first: Guess, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """The most probable tree, its first level by a guess at the roots; with `draws`, of the
        target's own draws. Of a node more than levels it is a chain.
        """
        assert self.roots is not None
        is_chain = budget.nodes == budget.depth + 1
        width = 1 if is_chain else min(MOST_OPENED, budget.nodes - 1)  # children of a node
        width = min(width, first.ids.shape[-1])
        goes_on = None if self.draft is None else self.draft.goes_on
        return dynamic_tree(self.roots, first, budget, width, self.expand, draws, goes_on)

    def expand(self, nodes: Nodes) -> Guess:
        """The guesses [B, n, k] of the children of drafted nodes, which stay pending."""
        tokens = self.drafter.own_ids(nodes.tokens)
        return self._guess(self._feed(tokens, nodes.depth, nodes.visible))

    def _guess(self, logits: torch.Tensor) -> Guess:
        """The best guesses by logits [B, n, V]; what the model knows of nodes is in its cache."""
        best, places, total = largest(self.drafter.proposable(logits), DRAFT_SUPPORT)
        return Guess(total[..., :0], best, self.drafter.target_ids(places), total)

    def _feed(self, tokens: torch.Tensor, depth: int, visible: torch.Tensor) -> torch.Tensor:
        """Pass over drafted tokens [B, n] of a depth, kept pending; logits [B, n, V] after them.

        The tokens are the draft model's own; `visible` [B or 1, n, pending + n] is which drafted
        ones each of them sees. The roots, which all see, are not among these.
        """
        assert self.cache.lengths is not None
        pending = int(self.roots_pending)
        visible = pad(visible, (pending, 0), value=True)
        mask = self.model.tree_mask(self.cache, visible)
        places = (self.cache.lengths[:, None] + depth + pending - 1).expand_as(tokens)
        positions = self.model.legal_positions(places)
        output = self.model.run(tokens, positions, mask, NO_FEATURES, self.cache)
        self.cache.keep_pending(tokens.shape[1])
        return output.logits


@cache
def chain(depth: int, device: torch.device) -> tuple[TreeShape, list[Level]]:
    """The form of a chain and its levels, made once."""
    shape = TreeShape.chain(depth)
    return shape, levels_of(shape, device)


def grown_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of trees of 1 to `depth` levels, beside the chains.

    The next token is not among the w best in (1 - alpha) / sqrt(w) of the cases: for a head for
    SmolLM2-135M that was right within 0.01 up to w = 10.
    """
    sizes = []
    for levels in range(1, depth + 1):
        for nodes in NODES_A_LEVEL:
            alpha = 1 - (1 - UNMEASURED_ALPHA) / nodes**0.5
            chances = tuple(alpha**level for level in range(1, levels + 1))
            sizes.append(Budget(1 + levels * nodes, levels, chances=chances))
    return tuple(sizes)
