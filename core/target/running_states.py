"""Layers that carry a running state: short convolutions, Mamba, gated delta rules and their kin.

transformers' layers hand states to functions that they look up by name. In passes that follow a
`StateCache` they find others under these names, which call the model's own function for each node
of a tree, with the state of its parent. No modelling file is patched: a layer's `forward` looks
elsewhere for one pass, as hooks come and go.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from drafthead.core.errors import UserError
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.state_cache import StateCache
from drafthead.core.trees.tree import ancestor_mask

STORES = {"update_conv_state", "update_recurrent_state"}  # by which a layer leaves a state
FEW = 8  # tokens that are quicker read one by one
Function = Callable[..., Any]


class StatefulLayer:
    """The `forward` of a layer that carries a state, in passes that follow a `StateCache`."""

    is_of_a_pass = True  # `weight_state` asks

    def __init__(self, module: nn.Module):
        self.module, self.plain = module, type(module).forward
        code = inspect.unwrap(self.plain)
        self.model_functions = code.__globals__
        self.cache = StateCache()  # of the current pass
        others = {name: FUNCTIONS[name](self, name) for name in known_functions(module)}
        self.forward = FunctionType(
            code.__code__, code.__globals__ | others, code.__name__, code.__defaults__,
            code.__closure__,
        )  # fmt: skip
        self.forward.__kwdefaults__ = code.__kwdefaults__

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The layer's outputs."""
        given = [each for each in (*args, *options.values()) if isinstance(each, StateCache)]
        if not given or not given[0].has_previous_state():
            return self.plain(self.module, *args, **options)
        [self.cache] = given
        return self.forward(self.module, *args, **options)

    def convolution(self, _name: str) -> Function:
        """`causal_conv1d_fn`, with the inputs on each node's path."""
        plain = self.model_functions["causal_conv1d_fn"]
        step = self.model_functions["causal_conv1d_update"]

        def run(columns: torch.Tensor, weight: torch.Tensor, *others: Any, **options: Any) -> Any:
            cache, width = self.cache, weight.shape[-1]
            if not cache.steps:
                return plain(columns, weight, *others, **options)
            if cache.is_chain:
                known, new = columns.tensor_split([-cache.new_nodes], dim=-1)
                return step(new, known[:, :, 1 - width :].clone(), weight, *others, **options)
            windows = cache.windows(columns, width)  # [B, C, N, K]
            batch, channels, nodes, _ = windows.shape
            known, new = windows.transpose(1, 2).flatten(0, 1).tensor_split([-1], dim=-1)
            found = step(new, known.contiguous(), weight, *others, **options)
            return found.view(batch, nodes, channels).transpose(1, 2)

        return run

    def convolution_of_one(self, name: str) -> Function:
        """`causal_conv1d_update`, which leaves its input to the cache."""
        run_columns = self.convolution(name)

        def run(inputs: torch.Tensor, _: torch.Tensor, *others: Any, **options: Any) -> Any:
            columns = self.cache.update_conv_state(inputs, *self.cache.slot)
            return run_columns(columns, *others, **options)

        return run

    def delta_rule(self, name: str) -> Function:
        """A gated delta rule: functions that return states, of one form for a text and a token."""
        plain = self.model_functions[name]
        step = self.model_functions[DELTA_RULES.get(name, name)]

        def run(*inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any) -> Any:
            if not self.cache.steps:
                is_short = inputs[0].shape[1] <= FEW
                return (step if is_short else plain)(*inputs, g=g, beta=beta, **options)

            def after(state: torch.Tensor, *place: Any) -> Any:
                *own, gates, betas = (part[place][:, None] for part in (*inputs, g, beta))
                given = options | {"g": gates, "beta": betas, "initial_state": state}
                found, state = step(*own, **given)
                return found[:, 0], state

            return self.cache.follow(after)

        return run

    def state_update(self, name: str) -> Function:
        """Mamba's step for one token, which writes into the state that it is given."""
        plain = self.model_functions[name]

        def run(_: torch.Tensor, *inputs: Any, **options: Any) -> torch.Tensor:
            def after(state: torch.Tensor, *_: Any) -> Any:
                state = state.clone()
                return plain(state, *inputs, **options), state

            return self.cache.follow(after)[0][:, 0]

        return run

    def scan(self, name: str) -> Function:
        """Mamba's scan: one state for each channel. Its own has no first state."""
        step = self.model_functions["mamba_selective_state_update"]

        def run(
            hidden: torch.Tensor,  # [B, D, N], as dt and z
            dt: torch.Tensor,
            A: torch.Tensor,  # noqa: N803  (the model's names)
            B: torch.Tensor,  # noqa: N803  [B, S, N], as C
            C: torch.Tensor,  # noqa: N803
            D: torch.Tensor,  # noqa: N803
            z: torch.Tensor,
            delta_bias: torch.Tensor | None = None,
            delta_softplus: bool = False,
            **_: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            parts = [part.transpose(1, 2) for part in (hidden, dt, B, C, z)]

            def after(state: torch.Tensor, *place: Any) -> Any:
                state = state.clone()
                x, t, b, c, gate = (part[place] for part in parts)
                bias = {"dt_bias": delta_bias, "dt_softplus": delta_softplus}
                return step(state, x, t, A, b, c, D, z=gate, **bias), state

            if self.cache.steps:
                found, state = self.cache.follow(after)
                return found.transpose(1, 2), state
            state, outputs = self.cache.running.recurrent[self.cache.slot], []
            for node in range(hidden.shape[2]):
                output, state = after(state, slice(None), node)
                outputs.append(output)
            return torch.stack(outputs, dim=-1), state

        return run

    def chunk_scan(self, name: str) -> Function:
        """Mamba 2's scan: one state for each head."""
        plain = self.model_functions[name]
        step = self.model_functions["mamba2_selective_state_update"]

        def run(
            hidden: torch.Tensor,  # [B, N, H, P]
            dt: torch.Tensor,  # [B, N, H]
            A: torch.Tensor,  # noqa: N803  [H], as D and dt_bias
            B: torch.Tensor,  # noqa: N803  [B, N, G, S], as C
            C: torch.Tensor,  # noqa: N803
            **options: Any,
        ) -> Any:
            if not self.cache.steps:
                return plain(hidden, dt, A, B, C, **options)
            size, names = hidden.shape[-1], ("D", "dt_bias")
            wide = {name: options[name][:, None].expand(-1, size) for name in names}
            rates = A[:, None, None].expand(-1, size, B.shape[-1])

            def after(state: torch.Tensor, *place: Any) -> Any:
                state = state.clone()
                times = dt[place][..., None].expand(-1, -1, size)
                given = hidden[place], times, rates, B[place], C[place]
                return step(state, *given, dt_softplus=options["dt_softplus"], **wide), state

            return self.cache.follow(after)

        return run


# Of one form for a text, and the other for a token.
DELTA_RULES = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
FUNCTIONS: dict[str, Callable[[StatefulLayer, str], Function]] = {
    "causal_conv1d_fn": StatefulLayer.convolution,
    "causal_conv1d_update": StatefulLayer.convolution_of_one,
    **dict.fromkeys([*DELTA_RULES, *DELTA_RULES.values()], StatefulLayer.delta_rule),
    "mamba_selective_scan": StatefulLayer.scan,
    "mamba2_chunk_scan": StatefulLayer.chunk_scan,
    "mamba_selective_state_update": StatefulLayer.state_update,
    "mamba2_selective_state_update": StatefulLayer.state_update,
}


def names_in(function: Any) -> set[str]:
    """What a function looks up."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else {*code.co_names}


def stores_of(module: nn.Module) -> set[str]:
    """By which names a module leaves states, in any of its methods."""
    methods = [method for method in vars(type(module)).values() if inspect.isfunction(method)]
    return STORES.intersection(*[set().union(*map(names_in, methods))])


def known_functions(module: nn.Module) -> set[str]:
    """The functions of a layer with a state that it finds others for."""
    return names_in(type(module).forward) & set(FUNCTIONS)


class StatefulLayers:
    """A context in which the layers of a model that carry a state go on from a `StateCache`.

    The caller holds the model's `hook_lock`. Passes of other threads run as ever.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.layers = [StatefulLayer(module) for module in modules]

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.module.__dict__["forward"] = layer

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            del layer.module.__dict__["forward"]


def stateful_layers(model: nn.Module) -> StatefulLayers | None:
    """The layers of a model that carry a state; None where no layer does.

    Raises UserError for layers that compute states by functions that are not known, and for layers
    that are not in memory all the time.
    """
    modules = [module for module in model.modules() if stores_of(module)]
    for module in modules:
        stores = stores_of(module)
        hidden = stores - names_in(type(module).forward)  # in another method
        if hidden or len(known_functions(module)) < 2 * len(stores):
            raise UserError(
                f"{type(model).__name__} is not supported as a target: {type(module).__name__} "
                "computes a running state by functions that drafthead does not know"
            )
        if not hasattr(module.__dict__.get("forward", StatefulLayer), "is_of_a_pass"):
            raise UserError(
                f"{type(model).__name__} is not supported as a target where its layers are on "
                "several devices or on disk: they carry a running state"
            )
    return StatefulLayers(modules) if modules else None


def difference(target: Any) -> float:
    """The share by which logits of a `Target` differ of a text that transformers' own cache reads
    token by token after a prompt, and in trees with wrong siblings, whose right path is committed.
    """
    ids = torch.arange(3, 11, device=target.device)[None] % target.vocab_size
    positions = torch.arange(8, device=target.device)[None]
    own, cache = DynamicCache(config=target.config), target.new_cache()
    expected = [
        target.run(ids[:, part], positions[:, part], None, NO_FEATURES, own).logits
        for part in (slice(2), *(slice(n, n + 1) for n in range(2, 8)))
    ][1:]
    target.read(ids[:, :2], positions[:, :2], None, NO_FEATURES, cache)
    cache.commit_prompt(positions[0, 2:3], 2, room=8)
    found = []
    for parents, right in (((-1, 0, 0, 2), (0, 2, 3)), ((-1,), (0,)), ((-1, 0), (0, 1))):
        visible = ancestor_mask(torch.tensor([parents], device=target.device))
        places = cache.longest + visible.sum(-1) - 1
        tokens = ids.gather(1, places)
        tokens[:, [node for node in range(len(parents)) if node not in right]] = 2
        output = target.run(tokens, places, target.tree_mask(cache, visible), NO_FEATURES, cache)
        path = torch.tensor([right], device=target.device)
        found.append(output.logits[:, right])
        end = cache.longest + len(right)
        cache.commit(path, torch.full_like(path[:, 0], end), end)
    read, known = (torch.cat(logits, dim=1).float() for logits in (found, expected))
    return float((read - known).norm() / known.norm())
