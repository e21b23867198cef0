"""The classic drafter: a separate small language model with the target's tokenizer.

`other_vocabulary` is for models with another one.

In each step it reads what the target has committed in one pass, which gives the first tokens, and
then passes over what it has drafted: K levels cost K passes. A chain has one token a level
(Leviathan et al., 2023, arXiv 2211.17192); a tree has the most probable paths, as EAGLE-2 grows
them (arXiv 2406.16858), whose passes over a few tokens hardly take longer. Both stop where the
model is too unsure for one more pass to pay, see `until_unsure`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from typing import Self, TypeAlias

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import (
    UNMEASURED_ALPHA,
    Committed,
    Drafter,
    DraftSession,
    at_last,
)
from drafthead.heads.drafting.late_reader import Unread
from drafthead.heads.errors import UserError
from drafthead.heads.host import to_host
from drafthead.heads.sampling import (
    DRAFT_SUPPORT,
    RowRandom,
    SamplingConfig,
    draft_distribution,
    draw_without_replacement,
)
from drafthead.heads.target.features import NO_FEATURES, Features
from drafthead.heads.target.target import Target
from drafthead.heads.trees.dynamic import Children, as_values, dynamic_tree
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape
from drafthead.infer.drafters.until_unsure import OneDraft, Sureness
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.engine.prefill import prefill

GROWN = "grown"  # the source of trees, beside the chains whose tokens can be drawn
# Nodes of a tree for each level, and the most nodes of a level that get children.
NODES_A_LEVEL = (3, 8)
MOST_OPENED = 8
Support: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # token ids and probabilities, [B, k] each


def same_tokenizer(target: Target, draft: Target) -> bool:
    """Whether two models give their tokens the same ids; without tokenizers they are taken to."""
    if target.tokenizer is None or draft.tokenizer is None:
        return True
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


def begins(model: Target) -> str:
    """How a model begins its answers, for messages."""
    if not model.has_encoder:
        return "without an encoder"
    return f"after an encoder with tokens {list(model.decoder_prompt)}"


class DraftModel(Drafter):
    """Chains and trees of up to `depth` levels from a separate language model."""

    features = NO_FEATURES
    sampling_rule = "traversal"

    def __init__(self, model: Target, target: Target, depth: int):
        """Raises UserError when the two tokenizers differ, when one model has an encoder and the
        other has none or begins with other tokens, or when depth is below 1.
        """
        if depth < 1:
            raise UserError(f"a draft model must draft at least 1 token, got {depth}")
        self.check_tokenizers(target, model)
        if model.decoder_prompt != target.decoder_prompt:
            raise UserError(
                f"a draft model must begin its answers as the target does, {begins(target)}, but "
                f"{type(model.model).__name__} begins them {begins(model)}"
            )
        self.model = model
        self.depth = depth
        self.shapes = [TreeShape.chain(d) for d in range(depth + 1)]
        self.budgets = tuple(sorted((*grown_budgets(depth), *chain_budgets(depth)), key=astuple))
        # Models of one family may pad their vocabularies to different sizes.
        self.vocab_size = min(model.vocab_size, target.vocab_size)
        # By the nodes of a level, and whether they are guesses of draws.
        self.sureness: defaultdict[tuple[int, bool], Sureness] = defaultdict(Sureness)

    def check_tokenizers(self, target: Target, model: Target) -> None:
        """Raises UserError, naming a token, when the two models give tokens different ids."""
        if same_tokenizer(target, model):
            return
        assert target.tokenizer is not None and model.tokenizer is not None
        ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
        token = min(t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t))
        raise UserError(
            f"the draft model's tokenizer differs from the target's: token {token!r} is "
            f"{theirs.get(token)} there and {ours.get(token)} here; OtherVocabulary is for these"
        )

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [..., S] of the S tokens that the target has as well, of all [..., V]."""
        return logits[..., : self.vocab_size]

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of tokens at places [...] among the S."""
        return places

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of proposed tokens [...]."""
        return tokens

    def chances(self, budget: Budget) -> tuple[float, ...]:
        """Of a chain as of any drafter; a tree has several guesses a level.

        The next token is not among the w best in (1 - alpha) / sqrt(w) of the cases: for a head for
        SmolLM2-135M that was right within 0.01 up to w = 10.
        """
        if budget.source != GROWN:
            return super().chances(budget)
        guesses = (budget.nodes - 1) / budget.depth
        alpha = 1 - (1 - UNMEASURED_ALPHA) / guesses**0.5
        return tuple(alpha**depth for depth in range(1, budget.depth + 1))

    def stops(self, budget: Budget) -> tuple[Budget, ...]:
        """Trees of fewer levels, with as many nodes a level."""
        of_a_level = (budget.nodes - 1) // budget.depth
        levels = range(1, budget.depth + 1)
        return tuple(Budget(1 + n * of_a_level, n, budget.source) for n in levels)

    def identity(self) -> str:
        """The shape of the model, and whether it is compiled."""
        return f"{type(self.model).__name__} {self.model.config.to_json_string()}"

    def compile(self) -> None:
        """Compile the model's passes; on a CPU they read its weights as bytes."""
        self.model = CompiledTarget(self.model, in_bytes=True)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session whose model has read the prompts [B, T] of lengths [B]."""
        return DraftModelSession(self, prompts, lengths)


class DraftModelSession(DraftSession):
    """A draft model at work; its cache holds committed tokens, drafted ones only while drafting."""

    row_state = ("cache", "host_lengths", "unread", "roots", "logits")

    def __init__(
        self,
        drafter: DraftModel,
        prompts: torch.Tensor,  # [B, T], right-padded
        lengths: torch.Tensor,  # [B]
    ):
        self.drafter, self.model = drafter, drafter.model
        self.cache = drafter.model.new_cache()
        self.host_lengths: list[int] = []
        self.unread: Unread | None = None  # until the commit of the prompt
        self.roots: torch.Tensor | None = None  # [B] the last tokens that were read
        self.logits: torch.Tensor | None = None  # [B, V] after them
        self.draft: OneDraft | None = None  # that may stop early, until its tokens are judged
        self.levels = 0  # of the last draft
        self._begin(prompts, lengths)

    def _begin(self, prompts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Read the prompts [B, T]."""
        room = 4 * (self.drafter.depth + 1)
        prefill(self.model, prompts, lengths, NO_FEATURES, self.cache, room)
        self.host_lengths = to_host(lengths)

    def commit(self, committed: Committed) -> None:
        """Keep the committed tokens to be read at the next proposal."""
        self._judge(committed)
        tokens, lengths = committed.tokens, committed.lengths
        new_tokens = committed.new_tokens
        if self.unread is None:  # the prompt pass: the prompt itself has been read already
            self.unread = Unread()
            tokens, lengths = committed.ends.roots[:, None], torch.ones_like(lengths)
            new_tokens = [tokens[-1:] for tokens in new_tokens]
        nothing = Features(last=None)
        width = max(map(len, new_tokens))
        self.unread.add(Committed(tokens, nothing, lengths, width, host_tokens=new_tokens))

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        """Go on with rows of both, once both have read what is unread."""
        self._catch_up()
        other._catch_up()
        super().join_rows(other, order)

    def cut(self, length: int) -> None:
        """Keep the tokens at the first `length` positions and the one that follows them."""
        self._catch_up()
        super().cut(length + 1)
        self.host_lengths = [min(count, length + 1) for count in self.host_lengths]

    def drafted(self, budget: Budget) -> Budget:
        """The budget with the levels of the last draft."""
        return self.drafter.stops(budget)[self.levels - 1]

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Read what is new, then draft level by level."""
        self._catch_up()
        depth = min(budget.depth, self.drafter.depth)
        if isinstance(random, RowRandom):
            tree = self._drawn(depth, sampling, random)
        else:
            self._begin_draft(budget, sampling, random)
            if budget.nodes > depth + 1:
                tree = self._grown(Budget(budget.nodes, depth), random)
            else:
                tree = self._chain(depth, random)
        self.levels = tree.max_depth
        self.cache.discard()
        return tree

    def _begin_draft(
        self, budget: Budget, sampling: SamplingConfig, draws: NextDraws | None
    ) -> None:
        """Watch how sure the model is, where the budget asks for that and reading is free.

        Only under rules that follow the target's own tokens: under others the text depends on the
        tree, which must not depend on other rows, nor on what earlier drafts have taught.
        """
        follows = sampling.greedy or draws is not None
        if follows and budget.least_chance > 0 and self.model.device.type == "cpu":
            kind = (budget.nodes - 1) // budget.depth, draws is not None
            self.draft = OneDraft(self.drafter.sureness[kind], budget.least_chance)

    def _goes_on(self, scores: torch.Tensor) -> bool:
        """Whether to pass over tokens with scores [B, F], see `OneDraft`."""
        return self.draft is None or self.draft.goes_on(scores)

    def _judge(self, committed: Committed) -> None:
        """Learn from what became of the last draft."""
        if self.draft is not None:
            self.draft.learn(self.levels, committed.counts)
            self.draft = None

    def _chain(self, depth: int, draws: NextDraws | None) -> TokenTree:
        """The most probable token after each other; with `draws`, guesses of the target's."""
        assert self.roots is not None and self.logits is not None
        tokens, logits = [self.roots], self.logits
        scores = [torch.zeros_like(self.roots, dtype=torch.float32)]
        for level in range(depth):
            if level > 0:
                if not self._goes_on(scores[-1][:, None]):
                    break
                logits = self._feed_one(tokens[-1], level)
            log_probs, ids = self._best(logits, 1, level, draws)
            tokens.append(ids[:, 0])
            scores.append(scores[-1] + as_values(log_probs[:, 0]))
        shape = self.drafter.shapes[len(tokens) - 1]
        return TokenTree.from_shape(shape, torch.stack(tokens, 1), scores=torch.stack(scores, 1))

    def _drawn(self, depth: int, sampling: SamplingConfig, random: RowRandom) -> TokenTree:
        """A chain of tokens drawn from the draft's distributions, which the tree carries."""
        assert self.roots is not None and self.logits is not None
        drafter, tokens, logits = self.drafter, [self.roots], self.logits
        supports: list[Support] = []
        for level in range(depth):
            if level > 0:
                logits = self._feed_one(tokens[-1], level)
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

    def _grown(self, budget: Budget, draws: NextDraws | None) -> TokenTree:
        """The most probable tree; with `draws`, of the target's own draws."""
        assert self.roots is not None and self.logits is not None

        def expand(
            tokens: torch.Tensor, above: torch.Tensor, visible: torch.Tensor, depth: int
        ) -> Children:
            logits = self._feed(tokens, depth, visible)
            return self._best(logits, width, depth, draws)

        width = min(MOST_OPENED, budget.nodes - 1)  # children of a node
        children = self._best(self.logits[:, None], width, 0, draws)
        return dynamic_tree(self.roots, budget, children, expand, self._goes_on)

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

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Read what was committed since the last proposal."""
        assert self.unread is not None
        committed = self.unread.take()
        if committed is not None:
            self.roots = committed.ends.roots
            for part in committed.chunks():
                self.logits = self._read(part if self.model.memory is None else part.padded())

    def _read(self, committed: Committed) -> torch.Tensor:
        """Read and commit tokens; returns the logits [B, V] after the last one of each row."""
        assert self.cache.lengths is not None
        tokens, lengths = committed.tokens, committed.lengths
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (steps[:, None] >= steps)[None]
        mask = self.cache.additive_mask(visible, self.model.dtype)
        positions = self.model.legal_positions(self.cache.lengths[:, None] + steps)
        output = self.model.run(tokens, positions, mask, NO_FEATURES, self.cache)
        pairs = zip(self.host_lengths, committed.counts, strict=True)
        self.host_lengths = [length + count for length, count in pairs]
        # The new columns of a single row are in place already.
        path = steps.expand(len(lengths), -1) if len(lengths) > 1 else None
        self.cache.commit(path, self.cache.lengths + lengths, max(self.host_lengths))
        return at_last(output.logits, lengths)

    def _feed_one(self, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [B, V] after the tokens [B] of a chain at a depth, which see those before them."""
        visible = torch.ones(1, 1, depth, dtype=torch.bool, device=tokens.device)
        return self._feed(tokens[:, None], depth, visible)[:, -1]

    def _feed(self, tokens: torch.Tensor, depth: int, visible: torch.Tensor) -> torch.Tensor:
        """Pass over drafted tokens [B, n] of a depth, kept pending; logits [B, n, V] after them.

        The tokens are the target's; `visible` [B or 1, n, pending + n] is which drafted ones each
        of them sees.
        """
        assert self.cache.lengths is not None
        mask = self.cache.additive_mask(visible, self.model.dtype)
        places = (self.cache.lengths[:, None] + depth - 1).expand_as(tokens)
        positions = self.model.legal_positions(places)
        own = self.drafter.own_ids(tokens)
        output = self.model.run(own, positions, mask, NO_FEATURES, self.cache)
        self.cache.keep_pending(tokens.shape[1])
        return output.logits


def grown_budgets(depth: int) -> tuple[Budget, ...]:
    """Budgets of trees of 1 to `depth` levels, beside the chains."""
    return tuple(
        Budget(1 + levels * nodes, levels, GROWN)
        for levels in range(1, depth + 1)
        for nodes in NODES_A_LEVEL
    )
