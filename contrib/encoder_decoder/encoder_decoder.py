"""Encoder-decoder targets, of the classes of T5 and BART.

A prompt is the source and, after it, the tokens with which the decoder begins. The encoder reads
the source once; what cross-attention sees of it is the first part of each row of the cache, see
`SourceCache`. From there on the decoder is a target like any other: to drafters, rules and the
engine, its answer continues the prompt.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.contrib.encoder_decoder.decoder_positions import (
    biased_attention,
    placed,
    position_table,
)
from drafthead.contrib.encoder_decoder.source_cache import SourceCache
from drafthead.core.errors import UserError
from drafthead.core.host import to_host
from drafthead.core.target.any_target import ENCODER_DECODER, TARGETS
from drafthead.core.target.architecture import cache_argument
from drafthead.core.target.features import NO_FEATURES, FeatureSpec
from drafthead.core.target.hooks import Place, Taps, evaluating, hook_lock
from drafthead.core.target.logit_finish import sample_ids
from drafthead.core.target.masks import MASKED_ATTENTION, LayerMasks
from drafthead.core.target.target import Target
from drafthead.core.target.tree_cache import TreeCache


class EncoderDecoderTarget(Target):
    """A frozen encoder-decoder language model.

    Hidden states are those that the output head reads. No draft head is made for them.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        """Raises UserError as `Target` does, and for a model that names no token to begin with."""
        super().__init__(model, tokenizer)
        self.decoder_prompt = first_tokens(self.model)

    @classmethod
    def check_kind(cls, name: str, with_encoder: bool) -> None:
        if not with_encoder:
            raise UserError(f"{name} is not an encoder-decoder model")

    def check_decoder(self, decoder: PreTrainedModel) -> None:
        self.encoder, self.decoder = self.model.get_encoder(), decoder
        implementation = self.config._attn_implementation
        takes = inspect.signature(type(self.model).forward).parameters
        reasons = {
            "it takes no encoder_outputs, decoder_attention_mask and cache": not (
                {"encoder_outputs", "decoder_attention_mask"} <= takes.keys()
                and cache_argument(type(self.model).forward)
            ),
            "its decoder counts positions by itself, and the nodes of a token tree share some": (
                biased_attention(decoder) is None and position_table(decoder) is None
            ),
            "its experts take so many tokens of a pass and no more": (
                getattr(self.config, "expert_capacity", None) is not None  # Switch, NLLB-MoE
            ),
            f"its {implementation} attention takes no tree mask; load it with "
            "attn_implementation='sdpa'": implementation not in MASKED_ATTENTION,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise UserError(f"{type(self.model).__name__} is not supported as target: {reason}")

    def find_last_state(self, decoder: PreTrainedModel) -> Place:
        """The input of the output head: BART has no final norm, and T5 scales its state."""
        return Place(self.model.get_output_embeddings(), is_input=True)

    def sample_pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states [1, T, D] and logits [1, T, V] of an answer that is its source too."""
        ids = sample_ids(self.model)
        with torch.no_grad(), Taps(self, FeatureSpec()) as taps:
            logits = self.model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        last = taps.features().last
        assert last is not None
        return last, logits

    def as_prompt(self, text: list[int]) -> list[int]:
        """The source, then the tokens with which the decoder begins.

        Raises UserError for a source that is longer than the encoder's positions.
        """
        if self.max_length is not None and len(text) > self.max_length:
            raise UserError(
                f"a source has {len(text)} tokens, but the encoder reads {self.max_length}: "
                "shorten it"
            )
        return [*text, *self.decoder_prompt]

    def legal_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [...] as they are: they count the source, and `forward` makes them legal."""
        return positions

    def new_cache(self) -> SourceCache:
        return SourceCache()

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Outputs [..., V] of the output head with BART's bias, where the model has one."""
        bias = getattr(self.model, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0]

    @torch.no_grad()
    def read_sources(
        self,
        ids: torch.Tensor,  # [B, T] right-padded: sources, and what the decoder begins with
        lengths: torch.Tensor,  # [B]
        cache: TreeCache,
        room: int,
    ) -> torch.Tensor:
        assert isinstance(cache, SourceCache)
        start = torch.tensor(self.decoder_prompt, device=ids.device)
        steps = torch.arange(len(start), device=ids.device)
        sources = lengths - len(start)
        bounds = min(counts := to_host(sources)), max(counts)
        read = ids[:, : bounds[1]]
        there = (torch.arange(bounds[1], device=ids.device) < sources[:, None]).long()
        # The decoder's pass over one token makes the keys and values of its cross-attention.
        made = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with hook_lock(self.model), evaluating(self.model):
            self.model(
                encoder_outputs=self.encoder(input_ids=read, attention_mask=there),
                attention_mask=there,
                decoder_input_ids=read.new_full((len(ids), 1), self.decoder_prompt[0]),
                use_cache=True,
                **{self.cache_name: made},
            )
        layers: Sequence[Any] = made.cross_attention_cache.layers  # the pass has written them
        states = [(layer.keys, layer.values) for layer in layers]
        cache.commit_sources(states, sources, bounds, len(start) + room)
        mask = cache.additive_mask((steps[:, None] >= steps)[None], self.dtype)
        tokens, positions = start.expand(len(ids), -1), cache.positions(len(start))
        found = self.read(tokens, positions, mask, NO_FEATURES.with_last(), cache)
        cache.commit(steps.expand(len(ids), -1), lengths, ids.shape[1])
        assert found.last is not None
        return found.last[:, -1]

    def forward(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T] that count the source
        attention_mask: LayerMasks,  # [B, 1, T, S]
        cache: Cache | None = None,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        assert isinstance(cache, SourceCache) and isinstance(attention_mask, torch.Tensor)
        positions = position_ids - cache.sources[:, None]
        if self.max_length is not None:
            positions = positions.clamp_max(self.max_length - 1)
        mask = attention_mask[..., cache.shortest :]
        # The encoder's states are not read: their keys and values are in the cache.
        nothing = input_ids.new_zeros(len(input_ids), cache.widest, 1, dtype=self.dtype)
        with placed(self.decoder, positions, mask):
            output = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=nothing),
                attention_mask=cache.source_mask(input_ids.shape[1], self.dtype),
                decoder_input_ids=input_ids,
                decoder_attention_mask=mask,
                use_cache=True,
                **{self.cache_name: cache.for_decoder()},
            )
        return output.logits

    @torch.no_grad()
    def plain_logits(
        self,
        text: Sequence[int],
        answers: torch.Tensor,  # [M, T]
        count: int,
    ) -> torch.Tensor:
        source, start = (
            torch.tensor([*ids], dtype=torch.long, device=answers.device).expand(len(answers), -1)
            for ids in (text, self.decoder_prompt)
        )
        begun = torch.cat([start, answers], dim=1)
        output = self.model(input_ids=source, decoder_input_ids=begun, use_cache=False)
        return output.logits[:, -count:]


TARGETS.register(ENCODER_DECODER, EncoderDecoderTarget, "kinds of target")


def first_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens with which `model.generate` lets the decoder begin: the start token, and the
    forced first one where the model has one, such as BART's or a language's.

    Raises UserError for a model that names none.
    """
    config = model.generation_config
    assert config is not None  # every model that generates has one
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if start is None:
        raise UserError(
            f"{type(model).__name__} names no token for the decoder to begin with: set "
            "decoder_start_token_id in its generation_config.json"
        )
    forced = config.forced_bos_token_id
    return (start,) if forced is None else (start, forced)
