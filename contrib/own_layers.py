"""The target drafts for itself: some of its layers, then its own norm and output head.

No training, and no second model: early exit (LayerSkip, Elhoushi et al., 2024, arXiv 2404.16710) is
the first layers, Draft & Verify (Zhang et al., 2023, arXiv 2309.08168) leaves out layers anywhere.
The layers that draft see in the target's cache what the target has committed, so none of them reads
a committed token again. What they write there for drafted tokens is discarded: the pass that
verifies these computes all layers.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.target.architecture import (
    find_decoder,
    find_layers,
    keep_layers,
    with_own_children,
)
from drafthead.core.target.hooks import evaluating, hook_lock, in_this_thread, share_lock
from drafthead.core.target.target import Target
from drafthead.infer.drafters.level_drafter import LevelDrafter, LevelSession
from drafthead.infer.loading.loaded import Fitting, register_drafter

CHECKED = 4  # tokens that a part of a target reads to show that it is one
LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


@register_drafter("layers", "0-7,20-29", has_length=True)
def named_layers(choice: str, fitting: Fitting) -> Drafter:
    """The target's layers of a list such as ``0-7,20-29``; ``0-9`` is an exit after ten.

    Raises UserError for what is no list, and for layers that are no part of the target.
    """
    if not LIST.fullmatch(choice):
        raise UserError(f"layers:{choice} is not a list of layers, such as layers:0-7,20-29")
    layers: list[int] = []
    for part in choice.split(","):
        first, _, last = part.partition("-")
        layers += range(int(first), int(last or first) + 1)
    refuse_other_layers(fitting.target, layers, named=choice)
    return OwnLayers(fitting.target, layers, fitting.length)


class OwnLayers(LevelDrafter):
    """Chains and trees of up to `depth` levels from some of the target's layers."""

    def __init__(self, target: Target, layers: Sequence[int], depth: int):
        """Raises UserError for layers that are no part of the target, or a depth below 1."""
        super().__init__(part_of(target, layers), target, depth)

    def __repr__(self) -> str:
        return f"{super().__repr__()} within the target"

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session for prompts [B, T], which the target's cache holds."""
        return OwnLayersSession(self)


class OwnLayersSession(LevelSession):
    """Some of the target's layers at work in the cache of what it has committed."""

    row_state = ("roots",)
    roots_pending = True

    def commit(self, committed: Committed) -> None:
        """Keep the last tokens: what comes before them is in the target's cache."""
        self._judge(committed)
        assert committed.cache is not None
        self.cache = committed.cache
        self.roots = committed.ends.roots

    @torch.no_grad()
    def _after_roots(self) -> torch.Tensor:
        """The logits [B, V] after the last committed tokens, which become pending."""
        assert self.roots is not None
        nothing = torch.ones(1, 1, 0, dtype=torch.bool, device=self.roots.device)
        return self._feed(self.roots[:, None], 0, nothing)[:, -1]


@torch.no_grad()
def part_of(target: Target, layers: Sequence[int]) -> Target:
    """A target that runs the given layers alone, in their order, then norm and output head.

    It has no weights of its own. Its layers keep their numbers in a cache: passes of the part and
    of the target share a cache, and each layer reads what it has written itself. Raises UserError
    for layers that the target lacks, or that cannot run without the others, for encoder-decoder
    models, and for layers that carry a running state.
    """
    target.refuse_encoder("drafting with some of its layers")
    target.refuse_states("drafting with some of its layers")
    refuse_other_layers(target, layers)
    try:  # it reads some tokens
        part = Target(with_layers(target.model, layers), target.tokenizer)
    except UserError as error:
        raise UserError(unlike(target, str(error))) from error
    part.numbers = tuple(layers)
    # It must compute what the target would without its other layers: these may share keys, or the
    # model may give each layer something of its own.
    tokens = torch.arange(CHECKED, device=target.device)[None] % target.vocab_size
    with hook_lock(target.model), evaluating(target.model):
        with ExitStack() as hooks:
            for number in {*range(target.num_layers)} - {*layers}:
                layer: nn.Module = target.layers[number]  # type: ignore[index]
                hook = in_this_thread(input_instead)
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            expected = target.forward(tokens, tokens, None)
        found = part.forward(tokens, tokens, None)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise UserError(unlike(target, "it then computes something else"))
    return part


def refuse_other_layers(target: Target, layers: Sequence[int], named: str = "") -> None:
    """Raise UserError for no layers, unknown ones, or any but an ascending order.

    `named` is how the user has named them.
    """
    last = target.num_layers - 1
    if layers and list(layers) == sorted({*layers}) and layers[0] >= 0 and layers[-1] <= last:
        return
    raise UserError(
        f"layers {named or list(layers)} cannot draft: the target has layers 0 to {last}, and of "
        "these at least one is named, in ascending order and each once"
    )


def with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model that shares all its modules with `model`, but has some of the layers only.

    Passes of both that need hooks wait for each other.
    """
    decoder = find_decoder(model)
    its_layers = find_layers(decoder)
    names = {id(module): name for name, module in model.named_modules()}
    twin = with_own_children(model)
    twin.config = deepcopy(model.config)
    own: nn.Module = twin
    *owners, place = names[id(its_layers)].split(".")
    for name in owners:
        own._modules[name] = with_own_children(getattr(own, name))
        own = getattr(own, name)
    own._modules[place] = nn.ModuleList(its_layers[layer] for layer in layers)  # type: ignore[index]
    config = twin.config.get_text_config(decoder=True)
    keep_layers(config, layers)
    twin.get_submodule(names[id(decoder)]).config = config  # type: ignore[assignment]  # torch takes attributes for its own
    share_lock(twin, model)
    return twin


def unlike(target: Target, reason: str) -> str:
    """Say why a part of the target cannot draft."""
    name = type(target.model).__name__
    return f"{name} cannot draft with some of its layers, which need the others ({reason})"


def input_instead(
    _layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, torch.Tensor],
    output: torch.Tensor | tuple[object, ...],
) -> torch.Tensor | tuple[object, ...]:
    """A layer's input [B, T, D] in the form of its output."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
