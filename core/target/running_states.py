"""Layers that carry a running state: short convolutions, Mamba, gated delta rules and their kin.

transformers' layers hand states to functions that they look up by name. In passes that follow a
`StateCache` they find others under these names, which call the model's own function for each node
of a tree, with the state of its parent. No modelling file is patched: a layer's `forward` looks
elsewhere for one pass, as hooks come and go. A layer by other functions runs once for each node.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache

from drafthead.core.errors import UserError
from drafthead.core.target.architecture import members, names_in
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.state_cache import StateCache
from drafthead.core.trees.tree import ancestor_mask

# By which a layer leaves a state; the last is MiniMax's.
STORES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
# Layers that keep states as attributes, and which; and those that know functions and call them for
# one head after the other.
OWN_STATES = {"RecurrentGemmaRecurrentBlock": ("conv1d_state", "rg_lru.recurrent_states")}
BY_HEAD = {"ZambaMambaMixer"}
FEW = 8  # tokens that are quicker read one by one
NO_LIMIT = 0.0, float("inf")  # of the time steps of a scan; a step for a single token has none
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

        def run(
            columns: torch.Tensor,  # [B, C, K + N]
            weight: torch.Tensor,  # [C, K]
            bias: torch.Tensor | None = None,
            activation: str | None = None,
            **options: Any,
        ) -> Any:
            if not self.cache.steps:
                return plain(columns, weight, bias, activation=activation, **options)
            # One product of a window is quicker than a convolution of few columns.
            found = (self.cache.windows(columns, weight.shape[-1]) * weight[:, None]).sum(-1)
            if bias is not None:
                found = found + bias[:, None]
            return (found if activation is None else ACT2FN[activation](found)).to(columns.dtype)

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


class OneState(Cache):
    """The states that a layer reads and leaves beside the outputs of one pass."""

    def __init__(self, states: dict[Any, torch.Tensor]) -> None:
        super().__init__(layers=[])
        self.states = states  # [R, ...]

    def has_previous_state(self, *_: object) -> bool:
        """Whether anything came before."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Tell convolutions to leave their inputs to the cache."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs [R, C, K] of a convolution; None before a prompt."""
        return self.states.get(("window", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A state [R, ...]; None before a prompt."""
        return self.states.get(("state", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,  # [R, C, N]
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Take N new inputs of a convolution; returns them after those before."""
        known = self.states.get(("window", state_idx))
        width = conv_kernel_size or (conv_states if known is None else known).shape[-1]
        if known is not None:
            found = torch.cat([known, conv_states], dim=-1)
        else:
            found = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.states["window", state_idx] = found[..., -width:]
        return found

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,  # [R, ...]
        layer_idx: int,
        state_idx: int = 0,
        **kwargs: object,
    ) -> torch.Tensor:
        """Take a new state."""
        self.states["state", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state [R, ...] of MiniMax's lightning attention."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Take a new state of it [R, ...]."""
        self.update_recurrent_state(linear_cache, layer_idx)


class TokenLayer:
    """The `forward` of a layer by functions that are not known, in passes that follow a
    `StateCache`: it runs once for each level of a tree, and reads a token after its parent's state.
    """

    is_of_a_pass = True  # `weight_state` asks

    def __init__(self, module: nn.Module, number: int):
        self.module, self.plain = module, type(module).forward
        self.slot = -1 - number, 0  # of its states, in one tensor [R, n]
        paths = [name.rpartition(".") for name in OWN_STATES.get(type(module).__name__, ())]
        self.attributes = [(module.get_submodule(path), name) for path, _, name in paths]
        self.parts: list[tuple[Any, torch.Size, torch.dtype]] = []  # what that one is made of
        self.outputs: list[torch.Size | None] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The layer's outputs."""
        names, values = (*range(len(args)), *options), [*args, *options.values()]
        caches = [each for each in values if isinstance(each, Cache)]
        if not caches:
            return self._run(OneState({}), args, options)[0]
        [cache] = caches
        if not isinstance(cache, StateCache):
            return self.plain(self.module, *args, **options)

        def run(given: list[Any], states: dict[Any, torch.Tensor]) -> Any:
            known = OneState(states)
            given = [known if each is cache else each for each in given]
            by_name = dict(zip(names[len(args) :], given[len(args) :], strict=True))
            return self._run(known, given[: len(args)], by_name)

        if not cache.has_previous_state():
            found, states = run(values, {})
            cache.last[self.slot] = self._packed(states)
            return found
        rows, count = next(each for each in values if isinstance(each, torch.Tensor)).shape[:2]

        def after(state: torch.Tensor, *place: Any) -> tuple[torch.Tensor, torch.Tensor]:
            given = [of_nodes(each, place, rows, count) for each in values]
            found, states = run(given, self._unpacked(state))
            found = found if isinstance(found, tuple) else (found,)
            # What has no place for each token is only for those who look on.
            per_token = [t if t is not None and t.shape[1] == 1 else None for t in found]
            self.outputs = [None if t is None else t.shape[2:] for t in per_token]
            parts = [t.flatten(1) for t in per_token if t is not None]
            return torch.cat(parts, dim=1), self._packed(states)

        cache.slot = self.slot
        if cache.steps:
            found = cache.follow(after)[0]
        else:
            state, outputs = cache.running.recurrent[self.slot], []
            for node in range(count):
                output, state = after(state, slice(None), node)
                outputs.append(output)
            found, cache.last[self.slot] = torch.stack(outputs, dim=1), state
        return self._split(found)

    def _run(self, known: OneState, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Outputs of the layer, and its states after it."""
        before = [getattr(*each) for each in self.attributes]
        for owner, name in self.attributes:
            setattr(owner, name, known.states.get(name))
        try:
            found = self.plain(self.module, *args, **options)
            own = {name: getattr(owner, name) for owner, name in self.attributes}
            return found, known.states | own
        finally:
            for each, value in zip(self.attributes, before, strict=True):
                setattr(*each, value)

    def _packed(self, states: dict[Any, torch.Tensor]) -> torch.Tensor:
        """The states as one tensor [R, n]."""
        self.parts = [(name, state.shape[1:], state.dtype) for name, state in states.items()]
        return torch.cat([state.flatten(1) for state in states.values()], dim=1)

    def _unpacked(self, state: torch.Tensor) -> dict[Any, torch.Tensor]:
        """The states in one tensor [R, n], as copies: a layer may write into them."""
        pieces = state.split([shape.numel() for _, shape, _ in self.parts], dim=1)
        return {
            name: piece.view(-1, *shape).to(dtype, copy=True)
            for (name, shape, dtype), piece in zip(self.parts, pieces, strict=True)
        }

    def _split(self, found: torch.Tensor) -> Any:
        """Outputs as the layer returns them, of those in one tensor [B, N, n]."""
        sizes = [shape.numel() for shape in self.outputs if shape is not None]
        pieces = iter(found.split(sizes, dim=-1))
        outputs = tuple(
            None if shape is None else next(pieces).unflatten(-1, shape) for shape in self.outputs
        )
        return outputs if len(outputs) > 1 else outputs[0]


def of_nodes(given: Any, place: tuple[Any, Any], rows: int, count: int) -> Any:
    """A layer's inputs for nodes at a place in a table [B, N]: of tensors [B or 1, N, ...]
    their part [R, 1, ...], also where they are in a tuple; all else as it is.
    """
    if isinstance(given, tuple):
        return tuple(of_nodes(each, place, rows, count) for each in given)
    if not isinstance(given, torch.Tensor) or given.shape[1:2] != (count,):
        return given
    return given.expand(rows, *given.shape[1:])[place][:, None]


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


def stores_of(module: nn.Module) -> set[str]:
    """By which names a module leaves states, in any of its methods."""
    methods = [method for method in vars(type(module)).values() if inspect.isfunction(method)]
    return STORES.intersection(*[set().union(*map(names_in, methods))])


def known_functions(module: nn.Module) -> set[str]:
    """The functions of a layer with a state that it finds others for."""
    return names_in(type(module).forward) & set(FUNCTIONS)


def is_known(module: nn.Module) -> bool:
    """Whether all functions by which a layer with a state computes it are known."""
    stores, kind = stores_of(module), type(module)
    in_others = stores - names_in(kind.forward)  # in another method
    is_whole = not in_others and len(known_functions(module)) >= 2 * len(stores)
    return kind.__name__ not in {*BY_HEAD, *OWN_STATES} and is_whole


class StatefulLayers:
    """A context in which the layers of a model that carry a state go on from a `StateCache`.

    The caller holds the model's `hook_lock`. Passes of other threads run as ever.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]):
        self.layers = [
            StatefulLayer(module) if is_known(module) else TokenLayer(module, number)
            for number, module in enumerate(modules)
        ]
        # Whether single tokens leave the states that a pass over a prompt does, see `differences`.
        limits = [getattr(module, "time_step_limit", NO_LIMIT) for module in modules]
        read_alike = all(tuple(map(float, limit)) == NO_LIMIT for limit in limits)
        self.cache_class = cache_class(model, read_alike)

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.module.__dict__["forward"] = layer

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            del layer.module.__dict__["forward"]


def stateful_layers(model: nn.Module) -> StatefulLayers | None:
    """The layers of a model that carry a state; None where no layer does.

    Raises UserError for layers that are not in memory all the time.
    """
    modules = [
        module
        for module in model.modules()
        if stores_of(module) or type(module).__name__ in OWN_STATES
    ]
    for module in modules:
        if not hasattr(module.__dict__.get("forward", StatefulLayer), "is_of_a_pass"):
            raise UserError(
                f"{type(model).__name__} is not supported as a target where its layers are on "
                "several devices or on disk: they carry a running state"
            )
    return StatefulLayers(model, modules) if modules else None


def own_cache(model: nn.Module) -> type[Cache] | None:
    """The class of caches that a model's module defines for it, as MiniMax's does."""
    kinds = (each for each in members(model) if isinstance(each, type))
    return next((kind for kind in kinds if issubclass(kind, Cache)), None)


def cache_class(model: nn.Module, read_alike: bool) -> type[StateCache]:
    """The class of `StateCache` that a model takes: some ask for one of their own."""
    own = own_cache(model)
    kinds = (StateCache,) if own is None else (StateCache, own)
    return type("OwnStateCache", kinds, {"reads_alike": read_alike})


def differences(target: Any) -> tuple[float, float]:
    """The shares by which logits of a `Target` differ of a text that transformers' own cache reads
    token by token after a prompt: in trees with wrong siblings, whose right path is committed, and
    as a prompt.
    """
    ids = torch.arange(3, 11, device=target.device)[None] % target.vocab_size
    positions = torch.arange(8, device=target.device)[None]
    kind, cache = own_cache(target.model), target.new_cache()
    own = DynamicCache(config=target.config) if kind is None else kind()
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
    at_once = target.run(ids, positions, None, NO_FEATURES).logits[:, 2:].float()
    read, known = (torch.cat(logits, dim=1).float() for logits in (found, expected))
    first, second = (float((each - known).norm() / known.norm()) for each in (read, at_once))
    return first, second
