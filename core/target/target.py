"""The frozen base model behind one interface, whatever its architecture.

Features are read with forward hooks on the model's own modules, so no modelling code is patched,
and quantised or PEFT-wrapped models work too. Only the requested layers are stored; transformers'
`output_hidden_states=True` would store them all.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.backend import BACKENDS, EAGER, Backend
from drafthead.core.errors import UserError, first_line
from drafthead.core.kv_cache.column_cache import FRESH, FreshMemory, TreeKernels
from drafthead.core.target.architecture import (
    NORM_NAMES,
    cache_argument,
    can_skip_logits,
    find_any,
    find_decoder,
    find_layers,
    without_wrapper,
)
from drafthead.core.target.block_modules import BlockLinear, Int4Linear, kinds_of
from drafthead.core.target.context import Context
from drafthead.core.target.features import NO_FEATURES, Features, FeatureSpec
from drafthead.core.target.hooks import Place, Taps, evaluating, leaving_nothing
from drafthead.core.target.int8 import Int8Linear
from drafthead.core.target.logit_finish import Finish, found_finish, has_numbers, sample_ids
from drafthead.core.target.masks import (
    HYBRID_LAYERS,
    STATE_MASKS,
    LayerMasks,
    alibi_by_position,
    check_forward,
    layer_kinds,
    masks_by_kind,
    uses_alibi,
)
from drafthead.core.target.running_states import differences, stateful_layers
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.target.weight_types import BITSANDBYTES, INT4, INT8, quantisation_of

# Share by which logits may differ, in types of so many bytes.
MOST_DIFFERENT = {2: 0.1, 4: 1e-3, 8: 1e-3}


@dataclass(frozen=True)
class TargetOutput:
    """The result of one forward pass."""

    logits: torch.Tensor  # [B, T or logits_to_keep, V]
    features: Features


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a forward pass over T tokens, see `Target.run`."""

    ids: torch.Tensor  # [B, T]
    positions: torch.Tensor  # [B, T]
    mask: LayerMasks  # [B, 1, T, S], or of `tree_mask`
    features: FeatureSpec
    cache: Cache | None
    logits_to_keep: int | None = None  # of the last positions, 0: of all; None: none is read


class Target:
    """A frozen causal language model with taps on its hidden states.

    `EncoderDecoderTarget` is the subclass for models with an encoder.
    """

    # What follows the source in a prompt: with it the decoder begins. Empty without an encoder.
    decoder_prompt: tuple[int, ...] = ()
    memory: FreshMemory = FRESH  # of its caches
    backend: Backend = EAGER
    kernels: TreeKernels | None = None  # of recorded passes, where they fit the model
    # Of a part of a larger target: which of the latter's layers it has, and so of its caches.
    numbers: tuple[int, ...] | None = None

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        """Find the layers of `model`; a PEFT wrapper is removed, its adapters stay.

        The model stays as it is: passes have no gradients, and are in evaluation mode.

        Raises UserError when decoder layers or output head are not found, when the layers cannot
        run a token tree, when the model's logits are not those of `project`, or when the model has
        an encoder and this class is not for such models, or the other way round.
        """
        model = without_wrapper(model)
        self.check_kind(type(model).__name__, model.config.is_encoder_decoder)
        self.model: Any = model  # a `PreTrainedModel`, with what its class has beside that
        self.called: Any = model  # by passes: other modules may stand in for its own
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.context = Context.of(self.config)
        self.stateful_layers = stateful_layers(model)
        # They decide which masks a pass needs.
        with_states = self.stateful_layers is not None
        self.layer_kinds = layer_kinds(self.config, type(model).__name__, with_states)
        decoder = find_decoder(model)
        self.check_decoder(decoder)
        self.layers = find_layers(decoder)
        self.last_state = self.find_last_state(decoder)
        output_head = model.get_output_embeddings()
        if output_head is None:
            raise UserError(f"{type(model).__name__} has no output head to predict tokens with")
        self.output_head: nn.Module = output_head
        self.has_alibi = uses_alibi(self.config)
        # Where logits are skipped the output head reads nothing.
        self.skips_logits = not self.last_state.is_input and can_skip_logits(model, decoder)
        self.cache_name = cache_argument(type(model).forward)
        self.functions: dict[Hashable, Any] = {}  # that run its passes, by what they were made for
        with leaving_nothing(model):
            self.finish = self.find_finish()
            self.check_states()

    def check_decoder(self, decoder: PreTrainedModel) -> None:
        """Raise UserError with the reason when the decoder cannot run a token tree."""
        check_forward(self.model, decoder, self.config, self.layer_kinds)

    def find_last_state(self, decoder: PreTrainedModel) -> Place:
        """The place of the last hidden state: the final norm's output, or else `head_input`."""
        norm = find_any(decoder, NORM_NAMES)
        return self.head_input() if norm is None else Place(norm)

    def head_input(self) -> Place:
        """The output head's input; raises UserError where its width is not that of layers."""
        head: Any = self.model.get_output_embeddings()
        if getattr(head, "in_features", None) != self.hidden_size:
            raise UserError(
                f"{type(self.model).__name__} is not supported as a target: its output head reads "
                f"states of another width than the {self.hidden_size} of its layers"
            )
        return Place(self.called.get_output_embeddings(), is_input=True)

    @torch.no_grad()
    def find_finish(self) -> Finish:
        """The step from the output head to the model's logits, as one small pass shows it.

        Where more is computed after the final norm, the last state is what the output head reads.
        Raises UserError when it is in no way that its configuration explains.
        """
        try:
            return self._found_finish()
        except UserError:
            if self.last_state.is_input:
                raise
        self.last_state, self.skips_logits = self.head_input(), False
        return self._found_finish()

    def _found_finish(self) -> Finish:
        self.finish = Finish()  # of `project`, until it is found
        return found_finish(self.model, self.config, self.sample_pass, self.project)

    @torch.no_grad()
    def check_states(self) -> None:
        """Raise UserError where a tree that goes on from kept states is something else than what
        the model reads token by token; find out whether that is what it reads as a prompt.
        """
        if self.stateful_layers is None or not has_numbers(
            self.model.get_input_embeddings().weight
        ):
            return
        name, most = type(self.model).__name__, MOST_DIFFERENT[self.dtype.itemsize]
        try:
            share, as_prompt = differences(self)
        except Exception as error:  # whatever the code of a model raises that is given these
            raise UserError(
                f"{name} is not supported as a target: it cannot go on from a running state "
                f"({first_line(error)})"
            ) from error
        if not share < most:
            raise UserError(
                f"{name} is not supported as a target: going on from its running state, a tree's "
                f"logits differ by {share:.1%} from those of single tokens"
            )
        self.stateful_layers.cache_class.reads_alike &= as_prompt < most

    def sample_pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states [1, T, D] and the model's own logits [1, T, V] of some tokens."""
        ids = sample_ids(self.model)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        output = self.run(ids, positions, None, FeatureSpec())
        assert output.features.last is not None
        return output.features.last, output.logits

    @classmethod
    def check_kind(cls, name: str, with_encoder: bool) -> None:
        """Raise UserError, naming the model, when it has an encoder."""
        if with_encoder:
            raise UserError(
                f"{name} is an encoder-decoder model, which can be decoded with a draft model or "
                "prompt lookup (generate, trace, compare, verify); this needs a "
                "decoder-only model"
            )

    @property
    def precision(self) -> str:
        """The type of the weights, as `load_target` takes it, or how they are quantised."""
        if any(isinstance(part, Int8Linear) for part in self.model.modules()):
            return INT8
        if any(isinstance(part, Int4Linear) for part in self.model.modules()):
            return INT4
        if kinds := kinds_of(self.model):
            return kinds
        return quantisation_of(self.model) or str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the hidden states."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)  # type: ignore[arg-type]

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Number V of logits."""
        return int(self.config.vocab_size)

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer, as for `model.generate`."""
        generation = self.model.generation_config
        ends = generation.eos_token_id if generation else None
        ends = self.config.eos_token_id if ends is None else ends
        return frozenset([ends] if isinstance(ends, int) else ends or ())

    @property
    def max_length(self) -> int | None:
        """Longest sequence in tokens that the positions allow; None when unlimited."""
        return self.context.length

    def legal_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [...] within the context: what lies past its end is computed, never kept."""
        return positions if self.max_length is None else positions.clamp_max(self.max_length - 1)

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the user's text and a decoder answers."""
        return bool(self.decoder_prompt)

    def refuse_encoder(self, what: str) -> None:
        """Raise UserError, naming what was wanted, when the model has an encoder."""
        if self.has_encoder:
            raise UserError(
                f"{what} is not available for {type(self.model).__name__}, an encoder-decoder model"
            )

    @property
    def keeps_more(self) -> str | None:
        """The states that layers keep beside keys and values, in words; None without any."""
        if self.stateful_layers is not None:
            return "its layers carry a running state"
        is_indexed = any(kind.name == "indexed_attention" for kind in self.layer_kinds)
        return "its layers choose keys by an indexer" if is_indexed else None

    def refuse_states(self, what: str) -> None:
        """Raise UserError, naming what was wanted, when layers keep more than keys and values."""
        if (reason := self.keeps_more) is not None:
            raise UserError(f"{what} is not available for {type(self.model).__name__}: {reason}")

    @cached_property
    def is_shared(self) -> bool:
        """Whether several processes hold parts of its weights, so that all run all passes."""
        return any(isinstance(weight, DTensor) for weight in self.model.parameters())

    def check_compilable(self) -> None:
        """Raise UserError for weights in blocks, and as `check_packable`."""
        self.check_packable()
        if kinds := kinds_of(self.model):
            raise UserError(f"compile is not for weights of {kinds}: load them with dtype bfloat16")

    def check_packable(self) -> None:
        """Raise UserError when layers are on other devices or on disk, in other processes, of
        bitsandbytes, or carry a running state.
        """
        if self.is_shared:
            raise UserError("compile is not for targets that several processes share")
        self.refuse_states("compile")
        if len({weight.device for weight in self.model.parameters()}) > 1:
            raise UserError("compile is for targets whose layers are all on one device")
        if (kind := quantisation_of(self.model)) in BITSANDBYTES:
            raise UserError(f"compile is not available for targets of the type {kind}")

    def as_prompt(self, text: list[int]) -> list[int]:
        """The prompt for a user's text of token ids: here the same.

        With an encoder the text is the source, which `decoder_prompt` follows; raises UserError for
        a source that is too long for the encoder.
        """
        return text

    def answer_prefix(self, prompt: Sequence[int]) -> Sequence[int]:
        """The text that an answer continues: the prompt, without the source where there is one.

        Its tokens count for `max_length`, and are what logits processors and criteria read.
        """
        return self.decoder_prompt or prompt

    def recorded(self, fuses: bool = True) -> "Target":
        """This target with passes recorded for its GPU; its model is shared.

        With `fuses` its layers are compiled; without, first answers come sooner.
        """
        with evaluating(self.model):
            made: Target = BACKENDS["recorded"](self, fuses)
        return made

    def packed(self, in_int8: bool = False) -> "Target":
        """This target with passes that run our kernels, where there are any for it.

        With `in_int8` they multiply whole numbers: for draft models.
        """
        made: Target = BACKENDS["packed"](self, in_int8)
        return made

    def new_cache(self) -> TreeCache:
        """An empty cache for passes of this target."""
        layers = self.stateful_layers
        return TreeCache() if layers is None else layers.cache_class()

    @property
    def reads_rows_alone(self) -> bool:
        """Whether each prompt of a batch is to be read in passes of its own: padding would go into
        running states.
        """
        return self.stateful_layers is not None

    @property
    def same_bits(self) -> bool:
        """Whether what a pass computes of a token has the same bits whatever else the pass reads.

        torch's kernels round otherwise for other numbers of tokens.
        """
        return False

    def begin(self, cache: TreeCache, columns: int) -> None:
        """Give an empty cache the memory for one row where rows are read alone.

        So the first pass over a prompt is like all others.
        """
        if self.reads_rows_alone and self.stateful_layers is None:
            cache.collect([self.one_token], [[0]], columns)
            cache.cut(0)

    @cached_property
    def one_token(self) -> TreeCache:
        """A cache that holds one token, and so knows the sizes of the keys of all layers."""
        cache, place = TreeCache(), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            Target.passed(self, PassInputs(place, place, None, NO_FEATURES, cache))
        cache.commit_prompt(place[0] + 1, 1, room=0)
        return cache

    def read_sources(
        self,
        ids: torch.Tensor,  # [B, T] right-padded: sources, and what the decoder begins with
        lengths: torch.Tensor,  # [B]
        cache: TreeCache,
        room: int,
    ) -> torch.Tensor:
        """Read prompts into an empty cache, with room for so many columns after them.

        Returns the last hidden states [B, D]. Raises NotImplementedError for a model without an
        encoder: its prompts are read in chunks.
        """
        raise NotImplementedError

    @property
    def final_norm(self) -> nn.Module:
        """The module after the last layer, of a model without an encoder."""
        return self.last_state.module

    @torch.no_grad()
    def final_norm_scale(self) -> torch.Tensor:
        """The factor [D] by which the final norm multiplies each of D normalised numbers.

        The norm is probed, because models differ in how they store this factor: in Gemma the weight
        is the factor minus 1.
        """
        # A vector of ones and minus ones is normalised already, and the difference between the norm
        # of it and of its opposite is free of any bias.
        signs = 1 - 2 * (torch.arange(self.hidden_size) % 2)
        signs = signs.to(self.device, self.dtype)
        if self.last_state.is_input:  # no norm comes last
            return torch.ones_like(signs)
        return (self.final_norm(signs) - self.final_norm(-signs)) / 2 * signs

    @torch.no_grad()
    def output_weight(self) -> torch.Tensor:
        """Weight [V, D] of the output head, to be read: it has no gradient."""
        if (matrix := self._plain_output_head()) is not None:
            return matrix.weight.detach()
        if isinstance(head := self.model.get_output_embeddings(), BlockLinear):
            return head.blocks.dequantised(self.dtype)
        # Quantised, or with an adapter: the columns are the outputs for unit vectors.
        rows = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
        return (self.output_head(rows) - self.output_head(torch.zeros_like(rows[:1]))).T

    @torch.no_grad()
    def input_weight(self) -> torch.Tensor:
        """Input embeddings [V, D] of all tokens, to be read: they have no gradient."""
        return self.embed(torch.arange(self.vocab_size, device=self.device))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings [..., D] of token ids [...]."""
        return self.model.get_input_embeddings()(token_ids)

    def project(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., V] of final hidden states [..., D], as the model itself computes them.

        With `tokens` [n], the logits [..., n] of these tokens alone, and no others are computed
        where the output head is a plain matrix.
        """
        if tokens is None:
            return self.finish_logits(self.output_head(hidden))
        matrix = self._plain_output_head()
        if matrix is None:
            return self.project(hidden)[..., tokens]
        bias = None if matrix.bias is None else matrix.bias[tokens]
        return self.finish_logits(linear(hidden, matrix.weight[tokens], bias))

    def next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of the token after each prompt, from final hidden states [B, D]."""
        return self.project(hidden)

    def _plain_output_head(self) -> nn.Linear | None:
        """The output head when it is a matrix of numbers: not quantised, without adapters."""
        head = self.output_head
        plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter
        return head if plain else None  # type: ignore[return-value]  # mypy knows no `type is`

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's scaling and cap, applied to outputs [..., V] of its output head."""
        return self.finish(logits)

    @torch.no_grad()
    def run(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: LayerMasks,  # [B, 1, T, S] added to the attention scores
        features: FeatureSpec,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """One forward pass over T tokens that follow the cached ones.

        Sliding windows, chunks and ALiBi are derived from the mask; None means causal.
        `logits_to_keep=n` returns the logits of the last n positions only (0: of all). Features are
        returned for all T positions.
        """
        given = PassInputs(input_ids, position_ids, attention_mask, features, cache, logits_to_keep)
        logits, found = self.passed(given)
        assert logits is not None
        return TargetOutput(logits[:, -logits_to_keep:], found)

    @torch.no_grad()
    def read(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor | None,  # [B, 1, T, S]
        features: FeatureSpec,
        cache: Cache | None = None,
    ) -> Features:
        """The features of the same pass; logits are not computed where the model can skip them."""
        return self.passed(PassInputs(input_ids, position_ids, attention_mask, features, cache))[1]

    def passed(self, given: PassInputs) -> tuple[torch.Tensor | None, Features]:
        """Logits [B, T or those to keep, V] and features [B, T, D] of a pass."""
        kept = given.logits_to_keep
        places = torch.empty(0, dtype=torch.long, device=given.ids.device) if kept is None else kept
        with Taps(self, given.features) as taps:
            logits = self.forward(given.ids, given.positions, given.mask, given.cache, places)
        return logits, self._here(taps.features())

    def _here(self, features: Features) -> Features:
        """The features on the device of the inputs, which those of layers elsewhere are not, and in
        the type that the output head reads: Mamba has them in float32.
        """
        matrix = self._plain_output_head()
        dtype = self.dtype if matrix is None else matrix.weight.dtype
        return features.map(lambda hidden: hidden.to(self.device, dtype))

    def forward(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: LayerMasks,  # [B, 1, T, S]
        cache: Cache | None = None,
        logits_to_keep: int | torch.Tensor = 0,  # their number, or their places [n]
    ) -> torch.Tensor:
        """The forward pass of `run` without features: logits [B, T, V], or those to keep alone
        where the model can skip the others.
        """
        options: dict[str, Any] = {self.cache_name: cache}
        if self.skips_logits:
            options["logits_to_keep"] = logits_to_keep
        masks, alibi = self._layer_masks(attention_mask)
        with alibi, self.stateful_layers or nullcontext():
            output = self.called(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=masks,
                use_cache=cache is not None,
                **options,
            )
        return output.logits

    def pass_function(self, function: Callable[..., Any], taps: "Taps") -> Callable[..., Any]:
        """A function that runs a pass within `taps`, as it is to be called."""
        return self.backend.record(function, self.around(taps))

    def around(self, taps: "Taps") -> AbstractContextManager[object]:
        """The context of a pass with these taps."""
        return taps

    def place_of(self, number: int) -> Place:
        """The place of the hidden state of a number in `FeatureSpec`."""
        if number == self.num_layers:
            return self.last_state
        return Place(self.layers[max(number, 0)], is_input=number == -1)  # type: ignore[index]

    def plain_logits(
        self,
        text: Sequence[int],
        answers: torch.Tensor,  # [M, T]
        count: int,
    ) -> torch.Tensor:
        """The logits [M, count, V] at the last positions of a user's text with each of the answers.

        One pass without a cache: what drafted decoding is measured by.
        """
        before = torch.tensor([*text], dtype=torch.long, device=answers.device)
        ids = torch.cat([before.expand(len(answers), -1), answers], dim=1)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.run(ids, positions, None, NO_FEATURES, logits_to_keep=count).logits

    def tree_mask(self, cache: TreeCache, visible: torch.Tensor) -> LayerMasks:
        """The mask that `run` takes for a pass over N new nodes; makes room for them.

        `visible` [B or 1, N, pending + N] is which pending and new nodes each new node sees.
        """
        return cache.additive_mask(visible, self.dtype)

    def later_mask(self, cache: TreeCache, places: torch.Tensor) -> torch.Tensor:
        """The mask that `read` takes for a prompt's positions `places` [T], which follow those in
        the cache; makes room for them.
        """
        return cache.later_mask(places, self.dtype)

    def _layer_masks(self, mask: LayerMasks) -> tuple[LayerMasks, AbstractContextManager[object]]:
        """The model's `attention_mask`, and a context that must be active while it runs."""
        if not isinstance(mask, torch.Tensor) or mask.dtype == torch.int64:
            return mask, nullcontext()  # the model's own, or for the tree kernel
        if self.has_alibi:
            return None, alibi_by_position(self.layers.children(), mask)
        masks = masks_by_kind(mask, self.layer_kinds)
        if isinstance(masks, dict) and self.stateful_layers is not None:
            of_all: dict[str, Any] = {**masks, **dict.fromkeys(STATE_MASKS)}  # nothing is padding
            of_all |= {name: masks.get(kind) for name, kind in HYBRID_LAYERS.items()}
            return of_all, nullcontext()
        return masks, nullcontext()
