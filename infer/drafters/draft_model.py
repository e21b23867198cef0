"""The classic drafter: a separate small language model with the target's tokenizer.

`other_vocabulary` is for models with another one.

In each step it reads what the target has committed in one pass, which gives the first token of its
chain, and the others token by token: K drafted tokens cost K passes (Leviathan et al., 2023,
arXiv 2211.17192).
"""

from collections.abc import Sequence
from typing import Self, TypeAlias

import torch

from drafthead.heads.coupling import Choice, NextDraws
from drafthead.heads.drafting.drafter import Committed, Drafter, DraftSession, at_last
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
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.heads.trees.static import chain_budgets
from drafthead.heads.trees.tree import Budget, TokenTree, TreeShape
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.engine.prefill import prefill

NO_FEATURES = FeatureSpec(layers=(), last=False)
Support: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # token ids and probabilities, [B, k] each


def same_tokenizer(target: Target, draft: Target) -> bool:
    """Whether two models give their tokens the same ids; without tokenizers they are taken to."""
    if target.tokenizer is None or draft.tokenizer is None:
        return True
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


class DraftModel(Drafter):
    """A chain of `depth` tokens from a separate language model."""

    features = NO_FEATURES
    sampling_rule = "traversal"

    def __init__(self, model: Target, target: Target, depth: int):
        """Raises UserError when the two tokenizers differ, or depth is below 1."""
        if depth < 1:
            raise UserError(f"a draft model must draft at least 1 token, got {depth}")
        self.check_tokenizers(target, model)
        self.model = model
        self.depth = depth
        self.shapes = [TreeShape.chain(d) for d in range(depth + 1)]
        self.budgets = chain_budgets(depth)
        # Models of one family may pad their vocabularies to different sizes.
        self.vocab_size = min(model.vocab_size, target.vocab_size)

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
        """The logits [B, S] of the S tokens that the target has as well, of all [B, V]."""
        return logits[:, : self.vocab_size]

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's numbers of tokens at places [...] among the S."""
        return places

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft model's numbers of proposed tokens [...]."""
        return tokens

    def identity(self) -> str:
        """The shape of the model, and whether it is compiled."""
        return f"{type(self.model).__name__} {self.model.config.to_json_string()}"

    def compile(self) -> None:
        """Compile the model's passes."""
        self.model = CompiledTarget(self.model)

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
        self._begin(prompts, lengths)

    def _begin(self, prompts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Read the prompts [B, T]."""
        room = 4 * (self.drafter.depth + 1)
        prefill(self.model, prompts, lengths, NO_FEATURES, self.cache, room)
        self.host_lengths = to_host(lengths)

    def commit(self, committed: Committed) -> None:
        """Keep the committed tokens to be read at the next proposal."""
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

    def propose(self, budget: Budget, sampling: SamplingConfig, random: Choice) -> TokenTree:
        """Read what is new, then draft token by token."""
        self._catch_up()
        assert self.roots is not None and self.logits is not None
        drafter, tokens, logits = self.drafter, [self.roots], self.logits
        supports: list[Support] = []
        shape = drafter.shapes[min(budget.depth, drafter.depth)]
        for depth in range(shape.depth):
            if depth > 0:
                logits = self._feed(drafter.own_ids(tokens[-1]), depth)
            known = drafter.proposable(logits)
            if random is None:
                tokens.append(drafter.target_ids(known.argmax(-1)))
                continue
            top = known.topk(min(DRAFT_SUPPORT, known.shape[-1]), dim=-1)
            ids = drafter.target_ids(top.indices)
            if isinstance(random, NextDraws):
                place = random.scores(depth, top.values, ids).argmax(-1, keepdim=True)
            else:
                probs = draft_distribution(top.values, sampling)
                place = draw_without_replacement(probs, 1, random.uniform(probs.shape[-1]))
                supports.append((ids, probs))
            tokens.append(ids.gather(1, place).squeeze(1))
        self.cache.discard()
        if not isinstance(random, RowRandom):
            return TokenTree.from_shape(shape, torch.stack(tokens, 1))
        # The last node has no children, but the table has a row for it.
        supports.append(supports[-1])
        draft_ids, draft_probs = (torch.stack(parts, 1) for parts in zip(*supports, strict=True))
        return TokenTree.from_shape(shape, torch.stack(tokens, 1), draft_ids, draft_probs)

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

    def _feed(self, token: torch.Tensor, depth: int) -> torch.Tensor:
        """Pass over the drafted token [B] of a depth, kept pending; logits [B, V] after it."""
        assert self.cache.lengths is not None
        visible = torch.ones(1, 1, depth, dtype=torch.bool, device=token.device)
        mask = self.cache.additive_mask(visible, self.model.dtype)
        positions = self.model.legal_positions(self.cache.lengths[:, None] + depth - 1)
        output = self.model.run(token[:, None], positions, mask, NO_FEATURES, self.cache)
        self.cache.keep_pending(1)
        return output.logits[:, -1]
