"""Language models that draft level by level: what all of them share, wherever their caches are.

A pass over the last committed tokens gives the first level, and each further level costs a pass
over what was drafted: K levels cost K passes. A chain has one token a level (Leviathan et al.,
2023, arXiv 2211.17192); a tree has the most probable paths, as EAGLE-2 grows them (arXiv
2406.16858), whose passes over a few tokens hardly take longer. Both stop where the model is too
unsure for one more pass to pay, see `until_unsure`.
"""

from abc import abstractmethod
from collections import defaultdict
from typing import ClassVar, TypeAlias

import torch
from torch.nn.functional import pad

from drafthead.core.coupling import Choice, NextDraws
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    Sampling,
    draft_distribution,
    draw_without_replacement,
)
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import UNMEASURED_ALPHA, Budget, TokenTree, TreeShape
from drafthead.heads.growing.dynamic import Children, dynamic_tree
from drafthead.heads.growing.static import chain_budgets
from drafthead.infer.drafters.until_unsure import OneDraft, Sureness

# Nodes of a tree for each level, and the most nodes of a level that get children.
NODES_A_LEVEL = (3, 8)
MOST_OPENED = 8
Support: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # token ids and probabilities, [B, k] each


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
        self.shapes = [TreeShape.chain(d) for d in range(depth + 1)]
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

    def compile(self, target: Target | None = None) -> None:
        """Compile the model's passes; on a CPU they multiply in int8."""
        if target is not None and not target.backend.compiles:
            self.model = self.model.packed(in_int8=True)
            return
        fuses = target is not None and target.backend.fuses
        self.model = self.model.compiled(in_int8=True, fuses=fuses)


class LevelSession(DraftSession):
    """A language model at work, which drafts level by level in a cache that it leaves as it was."""

    # Whether the roots are pending in the cache while they are drafted for, and not committed.
    roots_pending: ClassVar[bool] = False

    def __init__(self, drafter: LevelDrafter):
        self.drafter, self.model = drafter, drafter.model
        # A compiled model also looks here whether its weights have changed.
        self.cache = drafter.model.new_cache()
        self.roots: torch.Tensor | None = None  # [B] the last committed tokens
        self.draft: OneDraft | None = None  # that may stop early, until its tokens are judged
        self.levels = 0  # of the last draft

    @abstractmethod
    def _after_roots(self) -> torch.Tensor:
        """The logits [B, V] after the last committed tokens, once what is new has been read."""

    def propose(self, budget: Budget, sampling: Sampling, random: Choice) -> TokenTree:
        logits = self._after_roots()
        depth = min(budget.depth, self.drafter.depth)
        if isinstance(random, RowRandom):
            tree = self._drawn(logits, depth, sampling, random)
        else:
            self._begin_draft(budget, sampling, random)
            tree = self._grown(logits, Budget(max(budget.nodes, depth + 1), depth), random)
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

    def _drawn(
        self, logits: torch.Tensor, depth: int, sampling: Sampling, random: RowRandom
    ) -> TokenTree:
        """A chain of tokens drawn from the draft's distributions, which the tree carries; the first
        is that of logits [B, V].
        """
        assert self.roots is not None
        drafter, tokens = self.drafter, [self.roots]
        supports: list[Support] = []
        for level in range(depth):
            if level > 0:
                logits = self._feed_one(self.drafter.own_ids(tokens[-1]), level)
            known = drafter.proposable(logits)
            top = known.topk(min(DRAFT_SUPPORT, known.shape[-1]), dim=-1)
            ids, probs = drafter.target_ids(top.indices), draft_distribution(top.values, sampling)
            place = draw_without_replacement(probs, 1, random.uniform(probs.shape[-1]))
            supports.append((ids, probs))
            tokens.append(ids.gather(1, place).squeeze(1))
        # The last node has no children, but the table has a row for it.
        supports.append(supports[-1])
        draft_ids, draft_probs = (torch.stack(parts, 1) for parts in zip(*supports, strict=True))
        shape = drafter.shapes[depth]
        return TokenTree.from_shape(shape, torch.stack(tokens, 1), draft_ids, draft_probs)

    def _grown(self, first: torch.Tensor, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """The most probable tree, its first level by logits [B, V]; with `draws`, of the target's
        own draws. Of a node more than levels it is a chain.
        """
        assert self.roots is not None

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, visible: torch.Tensor, depth: int
        ) -> Children:
            logits = self._feed(self.drafter.own_ids(tokens), depth, visible)
            return self._best(logits, width, depth, draws)

        is_chain = budget.nodes == budget.depth + 1
        width = 1 if is_chain else min(MOST_OPENED, budget.nodes - 1)  # children of a node
        children = self._best(first[:, None], width, 0, draws)
        goes_on = None if self.draft is None else self.draft.goes_on
        return dynamic_tree(self.roots, budget, children, expand, goes_on)

    def _best(
        self,
        logits: torch.Tensor,  # [B, ..., V] after nodes of a depth
        count: int,
        depth: int,
        draws: NextDraws | None,
    ) -> Children:
        """Log-probabilities and tokens [B, ..., count] of the best children of nodes, or of the
        likeliest draws of the target's.
        """
        known = self.drafter.proposable(logits).float()
        count = min(count, known.shape[-1])
        if draws is None:
            best, places = known.topk(count, dim=-1)
            log_probs = best - known.logsumexp(-1, keepdim=True)
            return log_probs, self.drafter.target_ids(places)
        top = known.topk(min(DRAFT_SUPPORT, known.shape[-1]), dim=-1)
        ids = self.drafter.target_ids(top.indices)
        log_probs, places = draws.best(depth, top.values, ids, count)
        return log_probs, ids.gather(-1, places)

    def _feed_one(self, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] after own tokens [B] of a chain at a depth, which see those before them."""
        visible = torch.ones(1, 1, depth, dtype=torch.bool, device=tokens.device)
        return self._feed(tokens[:, None], depth, visible)[:, -1]

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
