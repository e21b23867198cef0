"""A part of a target: some of its layers, with the weights of the target and over its caches.

Early exit (LayerSkip, Elhoushi et al., 2024, arXiv 2404.16710) is the part of the first layers;
Draft & Verify (Zhang et al., 2023, arXiv 2309.08168) leaves out layers anywhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target.architecture import (
    find_decoder,
    find_layers,
    keep_layers,
    with_own_children,
)
from drafthead.core.target.hooks import evaluating, hook_lock, in_this_thread, share_lock
from drafthead.core.target.target import Target

CHECKED = 4  # tokens that a part reads to show that it is one


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
    refuse_unlike(target, part)
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


@torch.no_grad()
def refuse_unlike(target: Target, part: Target) -> None:
    """Raise UserError where a part computes anything but what the target would without its other
    layers: these may share keys, or the model may give each layer something of its own.
    """
    assert part.numbers is not None
    tokens = torch.arange(CHECKED, device=target.device)[None] % target.vocab_size
    passed = [n for n in range(target.num_layers) if n not in part.numbers]
    with hook_lock(target.model), evaluating(target.model):
        with passed_over([target.layers[number] for number in passed]):  # type: ignore[index]
            expected = target.forward(tokens, tokens, None)
        found = part.forward(tokens, tokens, None)
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise UserError(unlike(target, "it then computes something else"))


def unlike(target: Target, reason: str) -> str:
    """The sentence of `refuse_unlike`."""
    name = type(target.model).__name__
    return f"{name} cannot draft with some of its layers, which need the others ({reason})"


@contextmanager
def passed_over(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within, layers return what they are given, in passes of this thread.

    The caller holds the model's `hook_lock`.
    """
    handles = [
        layer.register_forward_hook(in_this_thread(input_instead), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def input_instead(
    _layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, torch.Tensor],
    output: torch.Tensor | tuple[object, ...],
) -> torch.Tensor | tuple[object, ...]:
    """A layer's input [B, T, D] in the form of its output."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
