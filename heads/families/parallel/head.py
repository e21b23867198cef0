"""Block-parallel heads: one pass of a small transformer drafts a whole block of tokens.

The logits of each slot are then corrected by the token before it, which a tree knows for each of
its nodes without another pass. DFlash (arXiv 2602.06036: no correction, the root's slot unused),
JetSpec (arXiv 2606.18394: causal in the block), DSpark (arXiv 2607.05147: Markov correction and
confidence output) and Domino (arXiv 2605.29707: recurrent correction) are configurations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from drafthead.core.errors import UserError
from drafthead.core.settings import Count, FromZero, settings
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead, ForTraining, register_head
from drafthead.heads.families.parallel.correction import Correction
from drafthead.heads.families.parallel.transformer import (
    BlockConfig,
    BlockTransformer,
    KeysValues,
    spread_taps,
)
from drafthead.heads.layers.draft_vocabulary import DraftVocabulary
from drafthead.heads.objectives.anchors import anchor_positions, labels_at
from drafthead.heads.objectives.batch import MAX_RANK, HeadBatch, HeadLoss
from drafthead.heads.objectives.chunked import Part, in_chunks
from drafthead.heads.objectives.losses import (
    TOKEN_LOSSES,
    DepthDecay,
    LossName,
    depth_weights,
    dpace_weights,
    hard_cross_entropy,
    overlap,
)

# Blocks of a row that attend at once in training: their mask grows with the square of this.
BLOCKS_AT_ONCE = 32

MOST_RANK = 256  # of a correction whose rank is not configured


@settings
class ParallelConfig(BlockConfig):
    """Shape and loss of a block-parallel head; what is 0 or empty is filled in from the target."""

    vocab_size: int = 0
    draft_vocab_size: FromZero = 0  # most frequent tokens to guess among; 0: the whole vocabulary
    correction: Literal["none", "markov", "gated", "recurrent"] = "markov"
    correction_rank: FromZero = 0  # a quarter of the hidden size, at most 256
    loss: ForTraining[LossName] = "soft"  # a name in losses.TOKEN_LOSSES
    depth_decay: ForTraining[DepthDecay] = 0.8  # token k's loss weighs depth_decay ** (k - 1)
    dpace: ForTraining[bool] = False  # weight places by what an error costs: `dpace_weights`
    warm: ForTraining[bool] = False  # start from copies of the target's own layers
    anchors: ForTraining[Count] = 32  # blocks of a row that a training step drafts
    anchor_places: ForTraining[Literal["random", "blocks"]] = "random"  # blocks: end to end
    # Of the confidence output's loss; 0: there is no such output.
    confidence_weight: Annotated[float, Field(ge=0)] = 0.0
    confidence_reads_token: bool = True  # it knows the token before the slot

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.hidden_size < self.correction_rank:
            raise ValueError(
                f"correction_rank must lie between 1 and the hidden size, got "
                f"{self.correction_rank}"
            )
        if 0 < self.vocab_size < self.draft_vocab_size:
            raise ValueError(
                f"draft_vocab_size must lie between 0 and the target's {self.vocab_size} tokens, "
                f"got {self.draft_vocab_size}"
            )


@dataclass(frozen=True)
class ChosenBlocks:
    """The blocks of a batch. A block's anchor is the position before its root."""

    anchors: torch.Tensor  # [B, A]
    valid: torch.Tensor  # [B, A] bool: the others pad rows with fewer blocks
    weights: torch.Tensor  # [B] number of possible anchors of the row for each chosen one


@register_head("parallel", ParallelConfig)
class ParallelHead(DraftVocabulary, DraftHead):
    """A block-parallel head."""

    def __init__(self, config: ParallelConfig):
        super().__init__(config)
        size, rank = config.hidden_size, config.correction_rank
        self.add_draft_vocabulary(config.vocab_size, config.draft_vocab_size)
        self.transformer = BlockTransformer(config)
        self.output = None
        if config.draft_vocab_size > 0:
            # Rows of the target's output head, as little trained as the whole of it.
            self.output = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.correction = None
        if config.correction != "none":
            logits = config.draft_vocab_size or config.vocab_size
            self.correction = Correction(config.correction, rank, size, config.vocab_size, logits)
        self.confidence = None
        if config.confidence_weight > 0:
            reads_token = config.confidence_reads_token and self.correction is not None
            self.confidence = nn.Linear(size + rank if reads_token else size, 1)

    @classmethod
    def sized(cls, config: ParallelConfig, target: Target) -> ParallelConfig:
        try:
            config = config.like(target)
            rank = config.correction_rank or max(1, min(MOST_RANK, config.hidden_size // 4))
            taps = config.taps or spread_taps(target.num_layers)
            return super().sized(replace(config, correction_rank=rank, taps=taps), target)
        except ValueError as error:
            raise UserError(f"head: {error}") from error

    @property
    def features_needed(self) -> FeatureSpec:
        return FeatureSpec(layers=self.config.taps, last=True)

    @property
    def depth(self) -> int:
        return self.config.depth

    def initialize(self, target: Target) -> None:
        if self.config.warm:
            self.transformer.begin_like(target)
        self.transformer.norm.weight.data.copy_(target.final_norm_scale())
        if self.output is not None:
            self.output.weight.data.copy_(target.output_weight()[self.draft_ids])
        if self.correction is not None:
            self.correction.begin_alike(target.input_weight())

    def base_logits(self, hidden: torch.Tensor, target: Target) -> torch.Tensor:
        """Logits [..., Vd] of slots [..., D] before the correction."""
        if self.output is None:
            return target.project(hidden)
        return target.finish_logits(self.output(hidden))

    def confidence_logits(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits [...] of the chance that the token drafted in a slot is accepted.

        From hidden states [..., D] of slots and the tokens [...] before them.
        """
        assert self.confidence is not None
        if self.confidence.in_features > hidden.shape[-1]:
            assert self.correction is not None
            hidden = torch.cat([hidden, self.correction.embed(before)], dim=-1)
        return self.confidence(hidden).squeeze(-1)

    def loss(self, batch: HeadBatch, target: Target) -> HeadLoss:
        """Sum over depths k of depth_decay^(k-1) x loss, as if all places had been anchors.

        Anchors are the positions whose next token (the root) is supervised; training drafts from
        `anchors` of them a row, measuring from all. For the ids ``p q A B C`` with A B C
        supervised, the block after root A sees p and q and learns B after A and C after B.
        """
        blocks = self.choose_blocks(batch)
        rows, _ = blocks.valid.nonzero(as_tuple=True)
        anchors = blocks.anchors[blocks.valid]  # [M]
        hidden = self.block_states(batch, target, blocks.anchors)[blocks.valid]  # [M, K, D]
        by_depth = [labels_at(batch, rows, anchors, offset=k + 2) for k in range(self.depth)]
        valid, labels = (torch.stack(c, dim=1) for c in zip(*by_depth, strict=True))  # [M, K]
        before = torch.cat([batch.input_ids[rows, anchors + 1, None], labels[:, :-1]], dim=1)
        codes = hidden[..., :0]
        if self.correction is not None:
            codes = self.correction.codes(before, hidden)
        # The target predicts a label one place before it.
        teachers = anchors[:, None] + 1 + torch.arange(self.depth, device=anchors.device)
        last = batch.features.last
        assert last is not None
        rule = TOKEN_LOSSES[self.config.loss]
        decay = torch.tensor(depth_weights(self.config.depth_decay, self.depth))

        @in_chunks(self.depth * self.num_guesses, self.parameters())
        def losses(
            hidden: torch.Tensor,  # [M, K, D]
            codes: torch.Tensor,  # [M, K, rank], rank 0 without a correction
            teacher: torch.Tensor,  # [M, K, D]
            before: torch.Tensor,  # [M, K]
            labels: torch.Tensor,  # [M, K]
            valid: torch.Tensor,  # [M, K]
            weights: torch.Tensor,  # [M, K]
        ) -> Iterator[Part]:
            """Of all slots: the weighted sum [] that is trained, token losses and ranks [M, K]."""
            logits, teacher_logits = self.slot_logits(hidden, codes, target), None  # [M, K, Vd]
            if rule.reads_target or self.confidence is not None:
                teacher_logits = self.teacher_logits(teacher, target)
            token_losses, ranks = self.judged(logits, teacher_logits, labels, rule)
            trained = token_losses
            if self.confidence is not None and teacher_logits is not None:
                accepted = overlap(logits.detach(), teacher_logits)
                trained = trained + self._confidence_losses(hidden, before, accepted)
            if self.config.dpace:
                weights = weights * dpace_weights(self._chances(logits, labels), valid)
            loss = (weights * trained.where(valid, 0)).sum()
            yield loss, token_losses.where(valid, 0), ranks.where(valid, MAX_RANK)

        total, ((sums, ranks),) = losses(
            hidden,
            codes,
            last[rows[:, None], teachers.clamp_max(last.shape[1] - 1)],
            before,
            labels,
            valid,
            blocks.weights[rows, None] * decay.to(hidden.device),
        )
        return HeadLoss(total, sums.sum(dim=0), valid.sum(dim=0), ranks)

    def slot_logits(
        self, hidden: torch.Tensor, codes: torch.Tensor, target: Target
    ) -> torch.Tensor:
        """Logits [..., Vd] of slots [..., D] after the correction by codes [..., rank]."""
        logits = self.base_logits(hidden, target)
        return logits if self.correction is None else logits + self.correction.output(codes)

    def _chances(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The draft's probabilities [M, K] of true tokens [M, K], from logits [M, K, Vd]."""
        guesses, known = self.guesses_of(labels.flatten())
        losses = hard_cross_entropy(logits.detach().flatten(0, 1), guesses)
        return torch.exp(-losses).where(known, 0).view_as(labels)

    def _confidence_losses(
        self,
        hidden: torch.Tensor,  # [M, K, D]
        before: torch.Tensor,  # [M, K]
        accepted: torch.Tensor,  # [M, K] chances that the token in a slot is accepted
    ) -> torch.Tensor:
        """The weighted losses [M, K] of the confidence output."""
        confidence = self.confidence_logits(hidden, before).float()
        losses = binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        return self.config.confidence_weight * losses

    def block_states(self, batch: HeadBatch, target: Target, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, A, K, D] of the blocks at anchors [B, A], one context for each row."""
        length = batch.input_ids.shape[1]
        positions = torch.arange(length, device=anchors.device).expand_as(batch.input_ids)
        fused = self.transformer.fused(batch.features.taps)
        context = self.transformer.context(fused, positions)
        rows = torch.arange(len(fused), device=fused.device)[:, None]
        parts = []
        for some in anchors.split(BLOCKS_AT_ONCE, dim=1):
            mask = self.training_mask(batch.segments, some)
            stores = [partial(appended, keys_values) for keys_values in context]
            roots = batch.input_ids.gather(1, some + 1)
            parts.append(self.transformer(target, roots, fused[rows, some], some + 1, mask, stores))
        return torch.cat(parts, dim=1)

    def training_mask(self, segments: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The bool mask [B, 1, A x block_size, T + A x block_size] of blocks at anchors [B, A].

        Slots see the tokens up to their anchor in its segment, by `segments` [B, T], and their own
        block.
        """
        places = torch.arange(segments.shape[1], device=segments.device)
        same = segments[:, None] == segments.gather(1, anchors)[..., None]
        context = same & (places <= anchors[..., None])  # [B, A, T]
        context = context.repeat_interleave(self.config.block_size, dim=1)
        context = self.transformer.in_window(context, anchors + 1)
        own = self.transformer.visible(anchors.shape[1], anchors.device)
        return torch.cat([context, own.expand(len(segments), *own.shape)], dim=-1)[:, None]

    def choose_blocks(self, batch: HeadBatch) -> ChosenBlocks:
        """All anchors when measuring; in training at most `anchors` of each row."""
        allowed = torch.zeros_like(batch.supervised)
        allowed[anchor_positions(batch)] = True
        counts = allowed.sum(dim=1)
        limit = self.config.anchors if self.training else allowed.shape[1]
        if self.training and self.config.anchor_places == "blocks":
            places = torch.arange(allowed.shape[1], device=allowed.device)
            allowed = allowed & (places % self.depth == 0)
        order = batch.uniform().masked_fill(~allowed, -1)
        taken = allowed.sum(dim=1).clamp_max(limit)
        anchors = order.topk(max(1, int(taken.max())), dim=1).indices
        valid = torch.arange(anchors.shape[1], device=anchors.device) < taken[:, None]
        # From left to right; a padding block has anchor 0, so that its root exists.
        anchors = torch.where(valid, anchors, allowed.shape[1]).sort(dim=1).values
        return ChosenBlocks(anchors.where(valid, 0), valid, counts / taken.clamp_min(1))


def appended(context: KeysValues, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
    """The context's keys and values, then those of the blocks, [B, Hkv, S, head_dim] each."""
    return torch.cat([context[0], keys], dim=2), torch.cat([context[1], values], dim=2)
