"""A target whose steps run compiled: same inputs, same outputs, less time.

The prompt pass stays eager: it is one pass, of another length each time.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from drafthead.heads.compilation import Compiled, Sizes, has_kernels
from drafthead.heads.target import Features, FeatureSpec, Taps, Target, TargetOutput
from drafthead.infer.kv_cache import Layers, StepCache, TreeCache, move_columns

# Columns that attention reads are rounded up to these. A graph for CPUs takes any number of them; a
# CUDA graph is recorded for one number, so there are to be few.
COLUMNS_A_GRAPH = {False: 1, True: 128}


class CompiledTarget(Target):
    """A target that compiles a graph for each kind of pass that it meets: one or several tokens,
    one or several rows. Cache columns, tree nodes and rows change freely within a kind.
    """

    def __init__(self, target: Target):
        super().__init__(target.model, target.tokenizer)
        self.passes: dict[FeatureSpec, CompiledPass] = {}
        self.move = Compiled(
            move_columns, target.device, target.dtype, kind_of_move, sizes_of_move
        )

    @property
    def compile_seconds(self) -> float:
        """Time spent on compiling so far."""
        return self.move.seconds + sum(made.graphs.seconds for made in self.passes.values())

    def new_cache(self) -> TreeCache:
        """A cache for passes that follow each other."""
        return TreeCache(COLUMNS_A_GRAPH[self.device.type == "cuda"], self.move)

    @torch.no_grad()
    def run(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor | None,  # [B, 1, T, S]
        features: FeatureSpec,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """As `Target.run`; passes behind a committed prompt are compiled."""
        if not isinstance(cache, TreeCache) or not cache.keys or attention_mask is None:
            return super().run(
                input_ids, position_ids, attention_mask, features, cache, logits_to_keep
            )
        if features not in self.passes:
            self.passes[features] = CompiledPass(self, features)
        return self.passes[features](input_ids, position_ids, attention_mask, cache)


class CompiledPass:
    """The passes of a target that keep the same features."""

    def __init__(self, target: Target, features: FeatureSpec):
        self.target = target
        # The hooks must be there at every call, as they were when the graph was made.
        self.taps = Taps(target, features)
        self.has_kernel = has_kernels(target.device, target.dtype)
        if self.has_kernel:
            from drafthead.infer import few_queries  # noqa: F401  (takes seconds; registers itself)
        self.graphs = Compiled(
            self._forward, target.device, target.dtype, self._kind, sizes_of_pass
        )

    def __call__(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        cache: TreeCache,
    ) -> TargetOutput:
        """Run the pass and write its keys and values into `cache`."""
        columns = cache.next_columns(input_ids.shape[1])
        with self.taps:
            logits, last, taps = self.graphs(
                input_ids, position_ids, attention_mask, columns, cache.keys, cache.values
            )
        return TargetOutput(logits, Features(last, taps))

    def _forward(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,  # [B, T]
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        columns: torch.Tensor,  # [T]
        keys: Sequence[torch.Tensor],  # of each layer [B, H, capacity, D]
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """Logits [B, T, V] and features [B, T, D]; what is traced into a graph."""
        cache = StepCache(keys, values, columns, attention_mask.shape[-1])
        on_cpu = input_ids.device.type == "cpu"
        with CpuAttention(self.has_kernel) if on_cpu else nullcontext():
            logits = self.target.forward(input_ids, position_ids, attention_mask, cache)
        features = self.taps.features()
        return logits, features.last, features.taps

    def _kind(
        self,
        input_ids: torch.Tensor,  # [B, T]
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,  # [B, 1, T, S]
        *_: object,
    ) -> tuple[bool, ...]:
        """One row or several, one token or several, and which layers look at a part only."""
        end = attention_mask.shape[-1]
        cut = (end > kind.reach for kind in self.target.layer_kinds)
        return input_ids.shape[0] == 1, input_ids.shape[1] == 1, *cut


def sizes_of_pass(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    columns: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> Sizes:
    """The sizes of a pass that change: rows, tokens, columns in use, columns there are."""
    layers = (*keys, *values)
    return [
        [(tensor, 0) for tensor in (input_ids, position_ids, attention_mask, *layers)],
        [(input_ids, 1), (position_ids, 1), (attention_mask, 2), (columns, 0)],
        [(attention_mask, 3)],
        [(tensor, 2) for tensor in layers],
    ]


def kind_of_move(
    keys: Layers, values: Layers, source: torch.Tensor, *_: object
) -> tuple[bool, bool]:
    """One row or several, one column or several: source [B, P]."""
    return source.shape[0] == 1, source.shape[1] == 1


def sizes_of_move(
    keys: Layers, values: Layers, source: torch.Tensor, destination: torch.Tensor
) -> Sizes:
    """The sizes that change from one commit to the next: rows, path, columns there are."""
    layers, moves = (*keys, *values), (source, destination)
    return [
        [(tensor, 0) for tensor in (*layers, *moves)],
        [(tensor, 1) for tensor in moves],
        [(tensor, 2) for tensor in layers],
    ]


class CpuAttention(TorchFunctionMode):
    """Attention of few queries, compiled: ours in bfloat16, a plain product for a single query.

    torch's own kernel for CPUs works through blocks of queries; with few of them its time is spent
    on preparations, and with one query it grows five times as fast with the number of keys.
    """

    def __init__(self, has_kernel: bool):
        """`has_kernel` says whether `few_queries` is there to be compiled."""
        super().__init__()
        self.has_kernel = has_kernel

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace `scaled_dot_product_attention`, and nothing else."""
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def attention(
        self,
        query: torch.Tensor,  # [B, H, T, D]
        key: torch.Tensor,  # [B, H, S, D]
        value: torch.Tensor,  # [B, H, S, D]
        attn_mask: torch.Tensor | None = None,  # [B, 1 or H, T, S] added to the scores
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """As torch's, with its arguments; the masks of our passes say all that is causal."""
        scale = scale or query.shape[-1] ** -0.5
        added = attn_mask is not None and attn_mask.is_floating_point()
        if self.has_kernel and added and query.shape[-1] % 32 == 0:
            return torch.ops.drafthead.attend(query, key, value, attn_mask, scale)
        if query.shape[2] == 1:
            return attention_of_one(query, key, value, attn_mask, scale, enable_gqa)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def attention_of_one(
    query: torch.Tensor,  # [B, H, 1, D]
    key: torch.Tensor,  # [B, H, S, D]
    value: torch.Tensor,  # [B, H, S, D]
    mask: torch.Tensor | None,  # [B, 1 or H, 1, S] added to the scores
    scale: float,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(query key^T scale + mask) value [B, H, 1, D]."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def new_cache(target: Target) -> TreeCache:
    """An empty cache that suits the way in which the target runs its passes."""
    return target.new_cache() if isinstance(target, CompiledTarget) else TreeCache()
