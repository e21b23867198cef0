"""A target whose passes run our kernels; the layers of a pass are one call, see `packed_modules`.

What a pass computes of a token depends on the tokens before it alone, bit by bit: not on what else
the pass reads, and so not on how a text was split into passes.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import psutil
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from drafthead.backends.cpu.kernels import library
from drafthead.backends.cpu.kernels.kernel_set import kernel_set
from drafthead.backends.cpu.kernels.operations import LARGEST_HEAD
from drafthead.backends.cpu.kernels.packing import packed_weights
from drafthead.backends.cpu.packed_heads import packed_head
from drafthead.backends.cpu.packed_modules import (
    PackedDecoder,
    PackedLayer,
    PackedLinear,
    PackedNorm,
    PackedRotations,
    is_llama_decoder,
    is_product,
    twin_of,
)
from drafthead.backends.cpu.substitutions import has_our_products, replacement_of
from drafthead.backends.cpu.threads import threads
from drafthead.core.backend import BACKENDS, Backend
from drafthead.core.errors import UserError, first_line
from drafthead.core.kv_cache.column_cache import move_columns
from drafthead.core.target.architecture import find_decoder, find_layers
from drafthead.core.target.features import NO_FEATURES, Features
from drafthead.core.target.hooks import hook_lock, in_this_thread
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.one_width import is_alike
from drafthead.core.target.target import PassInputs, Target
from drafthead.core.target.tree_cache import TreeCache
from drafthead.core.target.weight_state import state_of, users_hooks

# Share by which what a layer adds to its input may differ from the model's own, in bfloat16.
MOST_DIFFERENT = 0.05
HOOKED = "hooks on its modules read or change what these compute"

logger = logging.getLogger(__name__)


class PackedBackend(Backend):
    """Runs functions as they are, with our kernels in place of torch's operations."""

    def __init__(self) -> None:
        self.kernels = library.name_of(library.text())

    def within(self) -> AbstractContextManager[None]:
        return threads.for_a_call()

    def packed(self, head: Any) -> Any:
        """A twin of the head; the head itself where hooks read or change what its parts compute."""
        return head if any(map(users_hooks, head.modules())) else packed_head(head)

    def replacement_of(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """Our kernel."""
        return replacement_of(operation)


class PackedTarget(Target):
    """A target that runs our kernels in all passes that follow a cache."""

    def __init__(self, target: Target, in_int8: bool = False):
        """Share the target's model; see `packed_target`."""
        self.backend = PackedBackend()
        self.plain = target
        super().__init__(target.model, target.tokenizer)
        self.numbers = target.numbers
        self.in_int8 = in_int8
        self.pack()

    def find_finish(self) -> Finish:
        """The finish that the target has found, for the same model."""
        return self.plain.finish

    @torch.no_grad()
    def pack(self) -> None:
        """Read the model's weights as they are now."""
        self.state = state_of(self.model)
        self.called = twin_of(self.model, self.in_int8)
        decoder = find_decoder(self.called)
        # What passes run instead of the twin's own code, where that is known.
        self.decoder = PackedDecoder(decoder) if is_llama_decoder(decoder) else None
        self.layers = find_layers(decoder)
        after_norm = self.last_state.is_input
        self.last_state = self.head_input() if after_norm else self.find_last_state(decoder)
        self.output_head = self.called.get_output_embeddings()
        self.functions.clear()
        self.is_hooked = False

    def new_cache(self) -> TreeCache:
        """A cache for passes that follow each other.

        Where weights or adapters have changed since the last one, they are packed again.
        """
        if state_of(self.model) != self.state:
            self.pack()
            self.__dict__.pop("same_bits", None)
        self.is_hooked = has_hooks(self.model)
        if self.is_hooked:
            tell_of_torch(type(self.model).__name__, HOOKED)
        return TreeCache(move=self.backend.replacement_of(move_columns))

    @property
    def one_token(self) -> TreeCache:
        """The cache of the target."""
        return self.plain.one_token

    @property
    def dtype(self) -> torch.dtype:
        """The only type that is packed."""
        return torch.bfloat16

    def _plain_output_head(self) -> nn.Linear | None:
        """The plain output head of the model itself."""
        return self.plain._plain_output_head()

    def passed(self, given: PassInputs) -> tuple[torch.Tensor | None, Features]:
        """Logits [B, T, V] and features [B, T, D]; passes that follow a cache run our kernels."""
        with threads.for_a_call():
            if not self.runs_ours(given):
                return self.plain.passed(given)
            if (found := self.in_few_calls(given)) is None:
                return super().passed(given)
            if (kept := given.logits_to_keep) is None:
                return None, found
            assert found.last is not None
            return self.project(found.last[:, -kept:]), found

    def in_few_calls(self, given: PassInputs) -> Features | None:
        """The features of a pass that follows a cache; None where the twin's own code runs."""
        if self.decoder is None or not isinstance(given.cache, TreeCache):
            return None
        mask, _ = self._layer_masks(given.mask)
        taps = given.features.layers
        are_here = all(-1 <= tap <= self.num_layers for tap in taps)
        if not (are_here and isinstance(mask, torch.Tensor)):
            return None
        with hook_lock(self.model):  # passes of several threads would wait for each other's threads
            return self.decoder(given.ids, given.positions, mask, given.cache, taps)

    def runs_ours(self, given: PassInputs) -> bool:
        """Whether a pass runs our kernels: it follows a cache that has room for it."""
        cache = given.cache
        follows = isinstance(cache, TreeCache) and bool(cache.keys) and given.mask is not None
        return follows and not self.is_hooked

    @property
    def reads_rows_alone(self) -> bool:
        """Always true: so the passes over a prompt are the same in any batch."""
        return True

    @cached_property
    def same_bits(self) -> bool:
        """True where our kernels compute all that could differ, see `Target.same_bits`."""
        parts = list(self.called.modules())
        if any(isinstance(part, PackedLayer) for part in parts):
            known = PackedLayer, PackedLinear, PackedNorm, PackedRotations
            others = [part for part in parts if not isinstance(part, known)]
            return all(
                not list(part.parameters(recurse=False)) or is_lookup(part) for part in others
            )
        return (
            self.config._attn_implementation == "sdpa"
            and self.model._supports_attention_backend
            and all(states.shape[-1] <= LARGEST_HEAD for states in self.one_token.states)
            and all(map(has_our_products, self.model.modules()))
            and is_alike(self)
        )


def is_lookup(part: nn.Module) -> bool:
    """Whether a module hands out rows of a table."""
    return isinstance(part, nn.Embedding)


def packed_target(target: Target, in_int8: bool = False) -> Target:
    """The target with our kernels; as it is, with a line in the log, where it cannot have them."""
    if isinstance(target, PackedTarget) or target.device.type != "cpu":
        return target
    if target.dtype != torch.bfloat16:
        return target
    kernel_set()  # raises UserError where the user names one that cannot run
    try:
        target.check_packable()
        if reason := obstacle(target):
            raise UserError(reason)
        made = PackedTarget(target, in_int8)
        refuse_unlike(target, made)
    except Exception as error:  # whatever the code of a model raises that is given these
        reason = first_line(error)
        tell_of_torch(type(target.model).__name__, reason)
        return target
    return made


BACKENDS["packed"] = packed_target


def obstacle(target: Target) -> str | None:
    """The reason that a target cannot have our kernels; None where it can."""
    if not library.loaded():
        return "there are none for this processor"
    if target.has_encoder:
        return "it has an encoder"
    if target.backend.records or target.same_bits:
        return "its passes are made otherwise already"
    if has_hooks(target.model):
        return HOOKED
    weights = [part.weight for part in target.model.modules() if is_product(part)]
    if not weights:
        return "it has no matrices of bfloat16 numbers"
    is_packed = any(weight in packed_weights for weight in weights)  # for another target
    needed, free = sum(weight.nbytes for weight in weights), psutil.virtual_memory().available
    if needed > free and not is_packed:
        return f"packed weights take {needed / 1e9:.3g} GB more, and {free / 1e9:.3g} are free"
    return None


def has_hooks(model: PreTrainedModel) -> bool:
    """Whether something else reads or changes what the modules of a model compute."""
    return any(map(users_hooks, model.modules()))


@torch.no_grad()
def refuse_unlike(target: Target, made: PackedTarget) -> None:
    """Raise UserError where a layer adds to its input something else than the model's own does."""
    # Siblings after a committed text: a node that saw the wrong keys would show here.
    ids = torch.arange(1, 9)[None].clamp_max(target.vocab_size - 1)
    cache, calls = TreeCache(), []
    target.read(ids, ids - 1, None, NO_FEATURES, cache)
    cache.commit_prompt(torch.tensor([8]), 8, room=8)
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()  # a root with two children
    tokens, positions = ids[:, :3], cache.positions(2)[:, [0, 1, 1]]

    def keep(*call: Any) -> None:
        calls.append(call)

    handles = [
        layer.register_forward_hook(in_this_thread(keep), with_kwargs=True)
        for layer in target.layers.children()
    ]
    try:
        mask = target.tree_mask(cache, visible)
        target.run(tokens, positions, mask, NO_FEATURES, cache)
        for layer, (_, args, options, output) in zip(made.layers.children(), calls, strict=True):
            given = args[0] if args else options["hidden_states"]
            with threads.for_a_call():
                found, expected = first_of(layer(*args, **options)), first_of(output)
            share = float((found - expected).float().norm() / (expected - given).float().norm())
            if not share < MOST_DIFFERENT:
                raise UserError(f"a layer would give something else, by {share:.1%}")
    finally:
        for handle in handles:
            handle.remove()


def first_of(output: Any) -> torch.Tensor:
    """The hidden states [B, T, D] that a layer returns, alone or first."""
    return output[0] if isinstance(output, tuple) else output


@cache
def tell_of_torch(model: str, reason: str) -> None:
    """Say, once for each kind of model, why torch's kernels run."""
    logger.info("%s runs torch's own kernels: %s", model, reason)
