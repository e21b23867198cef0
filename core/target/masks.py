"""Attention masks of each kind of layer, and which targets cannot run a token tree.

A pass over a tree comes with one mask, for layers of unlimited reach. The masks of other layers
follow from it: a node sees exactly its ancestors and itself, so the rank of a key among the keys
that a node sees is that key's position, whatever cache column it is in::

    mask of one node    1 1 1 . . 1 . 1    three committed tokens, its parent, itself
    positions           0 1 2 . . 3 . 4
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.architecture import cache_argument, members, names_in, words_of
from drafthead.core.target.hooks import in_this_thread

# Names that transformers gives layers in a configuration's `layer_types`.
STATE_MASKS = ("linear_attention", "conv")  # of layers that carry a state: which tokens are padding
# Of layers that do both, what they attend to.
HYBRID_LAYERS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
RECURRENT_LAYERS = {*STATE_MASKS, *HYBRID_LAYERS}
# Of "indexed" layers a token looks at some of the keys that it sees, by keys of an indexer.
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
LAYERS_WITHOUT_ATTENTION = {"moe", "mlp", "sparse", "dense"}
# Attention implementations that add any mask to the scores.
MASKED_ATTENTION = {"eager", "sdpa"}
# What transformers' models accept: None (causal), one mask, or one for each kind of layer.
LayerMasks = torch.Tensor | dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class LayerKind:
    """A kind of attention layer, under the name by which transformers' models look up its mask.

    A token sees the last `window` positions, its own included; or the positions of its own block of
    `chunk` positions; or, with neither, all positions before it.
    """

    name: str
    window: int | None = None
    chunk: int | None = None

    @property
    def reach(self) -> float:
        """The longest sequence in which nothing is hidden."""
        return self.window or self.chunk or float("inf")

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """The first of the positions that tokens at positions [...] see.

        For positions 0 1 2 3 it is 0 0 1 2 with a window of 2, and 0 0 2 2 with chunks of 2.
        """
        if self.window is not None:
            return (positions - self.window + 1).clamp_min(0)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return torch.zeros_like(positions)

    def hides(self, positions: torch.Tensor) -> torch.Tensor:
        """The keys at positions [..., S] that are out of reach of the last one, the query.

        For positions 0 1 2 a window of 2 hides 0, and chunks of 2 hide 0 and 1.
        """
        return positions < self.first_seen(positions[..., -1:])

    def within_reach(self, mask: torch.Tensor) -> torch.Tensor:
        """The part of a mask [B or 1, 1, T, S] bool, true where a query may look, in reach.

        What a query may see follows each other in the text, so ranks among it are positions.
        """
        if mask.shape[-1] <= self.reach:
            return mask
        return mask & ~self.hides(mask.cumsum(-1) - 1)


def layer_kinds(
    config: PretrainedConfig, model_name: str, with_states: bool = False
) -> tuple[LayerKind, ...]:
    """The kinds of attention layers that a model has, each once; none where all carry a state.

    Raises UserError, naming the model, for layers in which a token tree cannot branch; those that
    carry a running state are among them unless the target keeps it `with_states`.
    """
    window = getattr(config, "sliding_window", None) or None
    chunk = getattr(config, "attention_chunk_size", None) or None
    names: Iterable[str] | None = getattr(config, "layer_types", None)
    if names is None:  # as transformers' own caches read such a configuration
        kind = "sliding" if window else "chunked" if chunk else "full"
        names = [f"{kind}_attention"]
    if with_states:  # layers that are hybrid in themselves attend as well
        names = [HYBRID_LAYERS.get(name, name) for name in names if name not in STATE_MASKS]
    found = [name for name in dict.fromkeys(names) if name not in LAYERS_WITHOUT_ATTENTION]
    if recurrent := [name for name in found if name in RECURRENT_LAYERS]:
        raise UserError(
            f"{model_name} has {' and '.join(recurrent)} layers, which carry a running state where "
            "drafthead cannot keep it: this target is not supported"
        )
    if other := [name for name in found if name not in MASKED_LAYERS]:
        raise UserError(
            f"{model_name} has {' and '.join(other)} layers, which choose what they attend to by "
            "rules that no tree mask can express: this target is not supported"
        )
    limits = {"sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return tuple(LayerKind(name, *limits.get(name, (None, None))) for name in found)


def misread_window(
    kinds: Sequence[LayerKind], decoder: PreTrainedModel, config: PretrainedConfig
) -> bool:
    """Whether transformers reads a window of a configuration in one way in a model's code, and in
    another in its cache: it has a window, and the layers are not those that slide in the code.
    """
    window, words = getattr(config, "sliding_window", None), words_of(type(decoder))
    if not window or window >= getattr(config, "max_position_embeddings", float("inf")):
        return False
    if not any("sliding_window" in word for word in words):  # such as Llama's
        return any(kind.window for kind in kinds)
    by_kind = {"sliding_attention", *HYBRID_LAYERS} & words
    return not by_kind and any(kind.reach == float("inf") for kind in kinds)  # MiniMax


def uses_alibi(config: PretrainedConfig) -> bool:
    """Whether a model adds a bias by key position that `alibi_by_position` can rearrange."""
    return config.model_type == "bloom" or (
        config.model_type == "falcon" and bool(getattr(config, "alibi", False))
    )


def counts_columns(decoder: PreTrainedModel) -> bool:
    """Whether anything in a model's module asks its cache for the column of the first query."""
    functions = [getattr(each, "forward", each) for each in members(decoder)]
    return any("get_query_offset" in names_in(function) for function in functions)


def has_cache_of_its_own(decoder: PreTrainedModel) -> bool:
    """Whether a model's module defines a cache that is none of transformers'."""
    own = [each for each in members(decoder) if each.__name__.endswith("Cache")]
    return any(isinstance(each, type) and not issubclass(each, Cache) for each in own)


def check_forward(
    model: PreTrainedModel,
    decoder: PreTrainedModel,
    config: PretrainedConfig,
    kinds: Sequence[LayerKind],
) -> None:
    """Raise UserError with the reason for a model that cannot run a pass over a token tree."""
    takes = inspect.signature(type(decoder).forward).parameters
    implementation = config._attn_implementation
    alibi = uses_alibi(config)
    # Falcon's eager code adds its ALiBi bias a second time, by column.
    maskable = {"sdpa"} if alibi and config.model_type == "falcon" else MASKED_ATTENTION
    has_unrotated_layers = 0 in (getattr(config, "no_rope_layers", None) or ())
    reasons = {
        "it keeps no key-value cache": not all(
            cache_argument(type(each).forward) for each in (model, decoder)
        ),
        "it keeps a running state in a cache of its own": has_cache_of_its_own(decoder),  # xLSTM
        "it counts positions by itself, and the nodes of a token tree share some": (
            "position_ids" not in takes and not alibi and kinds
        ),
        "its local layers count their window in columns of the cache, not in positions": (
            "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo
        ),
        "it counts distances in columns of the cache, not in positions": (
            counts_columns(decoder)  # Inkling
        ),
        "its code and transformers' cache apply sliding_window to different layers; set it to null "
        "in config.json": misread_window(kinds, decoder, config),
        "it scales attention by columns of the cache, not by positions": (
            has_unrotated_layers and getattr(config, "attn_temperature_tuning", False)  # Llama 4
        ),
        "each token of a prompt also sees those after it, which a cache cannot show it later": (
            getattr(config, "use_bidirectional_attention", None) in (True, "all")  # PaliGemma
        ),
        "its loops share the keys of the last one, which a tree's cache cannot give them": (
            getattr(config, "recurrent_kv_cache_mode", None) == "last_loop"  # Dory
        ),
        f"its {implementation} attention takes no tree mask; load it with "
        "attn_implementation='sdpa'": implementation not in maskable,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"{type(model).__name__} is not supported as a target: {reason}")


def key_positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of each key [..., S] under the additive mask [..., S], where 0 means visible.

    The last number is the query's own position; numbers at hidden keys mean nothing.
    For the mask 0 -inf 0 0 they are 0 0 1 2.
    """
    return (mask == 0).cumsum(-1, dtype=torch.int32) - 1


def masks_by_kind(
    mask: torch.Tensor,  # [B, 1, T, S] additive, 0 where a key is seen
    kinds: tuple[LayerKind, ...],
) -> LayerMasks:
    """The mask in the form that a model with these layers takes: one, or one for each kind."""
    if not kinds:
        return None
    # Nothing to compute while the whole sequence is within reach of every layer.
    if mask.shape[-1] <= min(kind.reach for kind in kinds):
        return mask
    positions = key_positions(mask)
    blocked = torch.finfo(mask.dtype).min
    masks = {
        kind.name: mask.masked_fill(kind.hides(positions), blocked)
        if kind.reach < mask.shape[-1]
        else mask
        for kind in kinds
    }
    return masks if len(masks) > 1 else masks[kinds[0].name]


@contextmanager
def alibi_by_position(
    layers: Iterable[nn.Module],
    mask: torch.Tensor,  # [B, 1, T, S] additive
) -> Iterator[None]:
    """Hooks on a model's layers that rearrange its ALiBi bias during one pass of this thread.

    ALiBi (arXiv 2108.12409): attention scores carry a bias by key position. BLOOM and Falcon
    compute it from cache columns, but the column of a tree node is not its position. So the model
    computes the bias as if there were no tree, and a hook before each layer moves every value to
    the columns that have its position under the tree mask.

    The model is called without a mask, and its layers receive `mask`. The caller holds the model's
    `hook_lock`, as passes with `Taps` do.
    """
    arranged: dict[str, torch.Tensor] = {}

    def arrange(
        _layer: nn.Module, inputs: tuple[object, ...], options: dict[str, torch.Tensor]
    ) -> tuple[tuple[object, ...], dict[str, torch.Tensor]]:
        if not arranged:  # the same for all layers of a pass
            arranged.update(arranged_bias(mask, options["alibi"], options["attention_mask"]))
        return inputs, options | arranged

    with ExitStack() as hooks:
        for layer in layers:
            hook = in_this_thread(arrange)
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def arranged_bias(
    mask: torch.Tensor,  # [B, 1, T, S] additive
    alibi: torch.Tensor,  # [B x H, 1, S] of BLOOM, else of another form
    by_column: torch.Tensor,  # [B, H, T, S] mask and bias of Falcon
) -> dict[str, torch.Tensor]:
    """The arguments of layers, with the bias by position in place of that by column."""
    positions = key_positions(mask).clamp_min(0).long()  # [B, 1, T, S]
    batch, _, queries, columns = positions.shape

    def arrange(bias: torch.Tensor) -> torch.Tensor:  # [B, H, 1, S] to [B, H, T, S]
        shape = (batch, bias.shape[1], queries, columns)
        return bias.expand(shape).gather(-1, positions.expand(shape))

    if alibi.dim() == 3:  # BLOOM: bias [B x H, 1, S] and mask are separate
        bias = arrange(alibi.view(batch, -1, 1, columns))
        return {"alibi": bias.flatten(0, 1), "attention_mask": mask}
    # Falcon adds the bias to the mask [B, H, T, S]; only the last query's row has all of it.
    bias = arrange(by_column[:, :, -1:])
    blocked = torch.finfo(bias.dtype).min
    return {"attention_mask": bias.masked_fill(mask < 0, blocked)}
