"""The classic drafter: a separate small language model with the target's tokenizer.

In `contrib/other_tokenizer` are models with another one. In each step it reads what the
target has committed in one pass, which gives the first level of what it drafts.
"""

from collections.abc import Sequence
from typing import Self

import torch

from drafthead.core.drafting.drafter import Committed, DraftSession, at_last
from drafthead.core.errors import UserError
from drafthead.core.host import to_host
from drafthead.core.target.features import NO_FEATURES, Features
from drafthead.core.target.target import Target
from drafthead.heads.families.late_reader import LateCommits
from drafthead.infer.drafters.level_drafter import LevelDrafter, LevelSession
from drafthead.infer.engine.prefill import prefill

MOST_STATES = 64  # tokens of a pass where layers carry a running state


def same_tokenizer(target: Target, draft: Target) -> bool:
    """Whether two models give their tokens the same ids; without tokenizers they are taken to."""
    if target.tokenizer is None or draft.tokenizer is None:
        return True
    return target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()


def begins(model: Target) -> str:
    """The beginning of a model's answers, for messages."""
    if not model.has_encoder:
        return "without an encoder"
    return f"after an encoder with tokens {list(model.decoder_prompt)}"


class DraftModel(LevelDrafter):
    """Chains and trees of up to `depth` levels from a separate language model."""

    def __init__(self, model: Target, target: Target, depth: int):
        """Raises UserError when the two tokenizers differ, when one model has an encoder and the
        other has none or begins with other tokens, or when depth is below 1.
        """
        self.check_tokenizers(target, model)
        if model.decoder_prompt != target.decoder_prompt:
            raise UserError(
                f"a draft model must begin its answers as the target does, {begins(target)}, but "
                f"{type(model.model).__name__} begins them {begins(model)}"
            )
        super().__init__(model, target, depth)

    def check_tokenizers(self, target: Target, model: Target) -> None:
        """Raises UserError, naming a token, when the two models give tokens different ids."""
        if same_tokenizer(target, model):
            return
        assert target.tokenizer is not None and model.tokenizer is not None
        ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
        token = min(t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t))
        raise UserError(
            f"the draft model's tokenizer differs from the target's: token {token!r} is "
            f"{theirs.get(token)} there and {ours.get(token)} here: `model_drafter` takes both"
        )

    def readable(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's own tokens [...] as it can read them: one that its table of embeddings lacks
        is read as the last of the table. What is drafted after it may be bad, and is verified.
        """
        return tokens.clamp_max(self.model.vocab_size - 1)

    def shortened(
        self, prompts: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts [B, T] of lengths [B] without the end of a source that is too long for an
        encoder.

        Where it reads 3 tokens and the decoder begins with 0, source and start 5 6 7 8 0 become
        5 6 7 0.
        """
        start, most = len(self.model.decoder_prompt), self.model.max_length
        if not start or most is None or prompts.shape[1] <= most + start:
            return prompts, lengths
        kept = (lengths - start).clamp_max(most)
        steps = torch.arange(most + start, device=prompts.device)
        left_out = (lengths - start - kept)[:, None]
        places = torch.where(steps < kept[:, None], steps, steps + left_out)
        return prompts.gather(1, places.clamp_max(prompts.shape[1] - 1)), kept + start

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        return DraftModelSession(self, *self.shortened(prompts, lengths))


class DraftModelSession(LevelSession):
    """A draft model at work; its cache holds committed tokens, drafted ones only while drafting."""

    row_state = ("cache", "host_lengths", "unread", "roots", "logits")
    drafter: DraftModel

    def __init__(
        self,
        drafter: DraftModel,
        prompts: torch.Tensor,  # [B, T], right-padded
        lengths: torch.Tensor,  # [B]
    ):
        super().__init__(drafter)
        self.host_lengths: list[int] = []
        self.unread: LateCommits | None = None  # until the commit of the prompt
        self.logits: torch.Tensor | None = None  # [B, V] after the roots
        self._begin(prompts, lengths)

    def _begin(self, prompts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Read the prompts [B, T]."""
        room, tokens = 4 * (self.drafter.depth + 1), self.drafter.readable(prompts)
        prefill(self.model, tokens, lengths, NO_FEATURES, self.cache, room)
        self.host_lengths = to_host(lengths)

    def commit(self, committed: Committed) -> None:
        self._judge(committed)
        tokens, lengths = committed.tokens, committed.lengths
        new_tokens = committed.new_tokens
        if self.unread is None:  # the prompt pass: the prompt itself has been read already
            self.unread = LateCommits()
            tokens, lengths = committed.ends.roots[:, None], torch.ones_like(lengths)
            new_tokens = [tokens[-1:] for tokens in new_tokens]
        nothing = Features(last=None)
        width = max(map(len, new_tokens))
        self.unread.add(Committed(tokens, nothing, lengths, width, host_tokens=new_tokens))

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        self._catch_up()
        other._catch_up()
        super().join_rows(other, order)

    def cut(self, length: int) -> None:
        self._catch_up()
        super().cut(length + 1)
        self.host_lengths = [min(count, length + 1) for count in self.host_lengths]

    def _after_roots(self) -> torch.Tensor:
        self._catch_up()
        assert self.logits is not None
        return self.logits

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Read what was committed since the last proposal."""
        assert self.unread is not None
        committed = self.unread.take()
        if committed is not None:
            self.roots = committed.ends.roots
            # Where layers carry a running state, one is kept for each token of a pass.
            is_plain = self.model.stateful_layers is None
            for part in committed.chunks() if is_plain else committed.chunks(MOST_STATES):
                self.logits = self._read(part.sized(self.model.memory))

    def _read(self, committed: Committed) -> torch.Tensor:
        """Read and commit tokens; returns the logits [B, V] after the last one of each row."""
        assert self.cache.lengths is not None
        tokens, lengths = self.drafter.readable(committed.tokens), committed.lengths
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (steps[:, None] >= steps)[None]
        mask = self.model.tree_mask(self.cache, visible)
        positions = self.model.legal_positions(self.cache.lengths[:, None] + steps)
        output = self.model.run(tokens, positions, mask, NO_FEATURES, self.cache)
        pairs = zip(self.host_lengths, committed.counts, strict=True)
        self.host_lengths = [length + count for length, count in pairs]
        # The new columns of a single row are in place already.
        path = steps.expand(len(lengths), -1) if len(lengths) > 1 else None
        self.cache.commit(path, self.cache.lengths + lengths, max(self.host_lengths))
        return at_last(output.logits, lengths)
