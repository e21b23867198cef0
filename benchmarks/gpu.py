"""What only a GPU can tell, in a quarter of an hour: see benchmarks/gpu/README.md.

`python benchmarks/gpu.py --phases facts,one_row --deadline 300 --output OUT` runs phases in one
process, the most valuable first. Each phase is one JSON file, which is written again after each of
its measurements, so a phase that fails or is cut off keeps what it had. `--rehearse` runs every
phase on a CPU with tiny shapes: what would fail there would cost minutes of a GPU.
"""

import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest import mock

import torch
import typer
import yaml
from bandwidth import copy_bandwidth, seconds_of, weight_bytes
from random_models import SHAPES, random_head, random_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from drafthead.backends.cuda import compiled_layers
from drafthead.backends.cuda.backend import RecordingBackend
from drafthead.backends.cuda.recorded import Recording
from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession, OnDevice
from drafthead.core.sampling import RowSampling, SamplingConfig, draw
from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.masks import LayerKind
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import PADDING, UNMEASURED_ALPHA, Budget, TokenTree, TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer import Decoder
from drafthead.infer.decoder import decoder_for
from drafthead.infer.request.prompts import encode
from drafthead.infer.timing.machine import describe_machine, describe_versions
from drafthead.lab.building.folder import RECORD
from drafthead.train.data.conversations import read_conversations

LAWS = {
    "top-p 0.9": SamplingConfig(1.0, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingConfig(1.0, top_k=50, top_p=0.9),
}
# Two graphs of products that share cuBLAS' workspace: does one work after the other has died?
SHARED_WORKSPACE = [
    sys.executable,
    "-c",
    """
import gc, torch
def captured(stream, x, w):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.nn.functional.linear(x, w)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = torch.nn.functional.linear(x, w)
    return graph, y
stream = torch.cuda.Stream()
make = {"device": "cuda", "dtype": torch.bfloat16}
x, w = torch.randn(16, 14336, **make), torch.randn(4096, 14336, **make)
first, y = captured(stream, x, w)
second, z = captured(stream, x, w)
del first
gc.collect()
torch.cuda.empty_cache()
taken = [torch.randn(2**22, device="cuda") for _ in range(64)]
second.replay()
torch.cuda.synchronize()
wanted = torch.nn.functional.linear(x, w)
assert torch.isfinite(z).all() and (z - wanted).abs().max() <= 0.05 * wanted.abs().max(), "wrong"
print("the second graph still computes the product")
""",
]
LEAST_LEFT = 5.0  # seconds before the deadline with which no measurement is begun

logger = logging.getLogger("gpu")


class OutOfTimeError(Exception):
    """The deadline is too near for another measurement."""


@dataclass
class Bench:
    """The device, what is tried on it, and where results go."""

    device: torch.device
    output: Path
    rehearse: bool
    ends_at: float  # perf_counter
    target: str  # a real model for the phase `real`
    head: str | None  # a head for it
    prompts: str
    build_minutes: float = 15.0
    only: Sequence[str] = ()  # parts of the names of what is measured; all without any
    targets: dict[str, Target] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # of the phase that runs
    path: Path = Path()

    def measure(self, name: str, call: Callable[[], Any]) -> Any:
        """Note what a call finds, or why it failed, and how long it took; returns it.

        Raises OutOfTimeError where little time is left.
        """
        if self.only and not any(part in name for part in self.only):
            return None
        if self.ends_at - time.perf_counter() < LEAST_LEFT:
            raise OutOfTimeError(name)
        started = time.perf_counter()
        try:
            value = call()
        except Exception as error:
            logger.warning("%s failed: %s", name, error)
            value = {"failed": str(error)[:400], "where": traceback.format_exc()[-900:]}
        self.found[name] = value
        self.found.setdefault("seconds", {})[name] = round(time.perf_counter() - started, 2)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.found.setdefault("peak_gib", {})[name] = round(peak, 2)
            torch.cuda.reset_peak_memory_stats()
        self.write()
        print(f"  {name}: {json.dumps(value)[:300]}", flush=True)
        return value

    def write(self) -> None:
        """Write the phase's file."""
        write_text(self.path, json.dumps(self.found, indent=1) + "\n")

    @property
    def names(self) -> tuple[str, ...]:
        """The shapes of models that are tried."""
        return ("SmolLM2",) if self.rehearse else ("SmolLM2", "8B")

    def shape(self, name: str) -> str:
        """A model's shape, or the tiny one of a rehearsal."""
        return "tiny" if self.rehearse else name

    def model(self, name: str, positions: int = 40_000) -> Target:
        """A random model, made once."""
        if name not in self.targets:
            self.targets[name] = random_llama(self.shape(name), self.device, positions)
        return self.targets[name]

    def size(self, real: int, tiny: int) -> int:
        """A size, or a small one in a rehearsal."""
        return tiny if self.rehearse else real


def milliseconds(seconds: float) -> float:
    """Rounded to a microsecond."""
    return round(1000 * seconds, 3)


def graphed(call: Callable[[], object], device: torch.device, calls: int = 20) -> float:
    """Microseconds of a call without the host: `calls` of them in one CUDA graph, median of 5.

    On a CPU the calls are timed one after the other.
    """
    if device.type != "cuda":
        return 1e6 * seconds_of(call, device)
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    taken = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1000 * start.elapsed_time(end) / calls)
    return round(median(taken[1:]), 2)


# Phase `facts`.


def facts(bench: Bench) -> None:
    """What the device is: bandwidth, launches, reads, and which attention torch prefers."""
    device, cuda = bench.device, bench.device.type == "cuda"
    bench.measure("machine", describe_machine)
    bench.measure("versions", describe_versions)
    bench.measure("copy_bytes_per_second", lambda: copy_bandwidth(device))
    small = torch.zeros(256, device=device)
    bench.measure("kernel_us", lambda: graphed(lambda: small.add_(1), device, calls=1000))
    bench.measure("launch_us", lambda: 1e6 * per_call(lambda: small.add_(1), device))
    bench.measure("read_us", lambda: 1e6 * per_call(small.tolist, device))
    bench.measure("python_loop_us", lambda: 1e6 * seconds_of(count_up, device))
    if cuda:
        bench.measure("sdp_priority", lambda: [str(b) for b in torch._C._get_sdp_priority_order()])
        bench.measure("cudnn", torch.backends.cudnn.version)
        bench.measure("graph that outlives another", lambda: ended(bench, SHARED_WORKSPACE))


def per_call(call: Callable[[], object], device: torch.device, calls: int = 500) -> float:
    """Seconds a call of many calls in a row."""

    def many() -> None:
        for _ in range(calls):
            call()

    many()
    return seconds_of(many, device) / calls


def count_up() -> int:
    """A fixed loop: how fast Python is here."""
    total = 0
    for number in range(100_000):
        total += number & 7
    return total


# Phase `kernels`.


def kernels(bench: Bench) -> None:
    """Products and attention alone: microseconds, by shape."""
    for name in bench.names:
        vocab, hidden, inner, _, heads, key_heads, _ = SHAPES[bench.shape(name)]
        width = hidden // heads
        shapes = {
            "qkv": (hidden, (heads + 2 * key_heads) * width),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
            "output": (hidden, vocab),
        }
        for part, (inputs, outputs) in shapes.items():
            bench.measure(f"{name} {part} us", lambda i=inputs, o=outputs: products(bench, i, o))
        shapes_tried = ((1, 512), (1, 8192), (16, 1024), (1, 32768))
        for rows, columns in ((2, 32),) if bench.rehearse else shapes_tried:
            for nodes in (1, 16, 64):
                form = rows, heads, key_heads, width, columns, nodes
                bench.measure(
                    f"{name} attention B={rows} S={columns} N={nodes} us",
                    lambda form=form: attention(bench, *form),
                )

        for rows in (2,) if bench.rehearse else (1, 16, 256):
            for law in LAWS:
                bench.measure(
                    f"{name} draw rows={rows} {law} us",
                    lambda v=vocab, r=rows, x=law: drawing(bench, v, r, LAWS[x]),
                )


def drawing(bench: Bench, vocab: int, rows: int, law: SamplingConfig) -> dict[str, Any]:
    """Microseconds of draws under filters, with rows sorted and by our kernel, and how often these
    differ: where rounding moves the border of what is kept.
    """
    logits = 3 * torch.randn(rows, 1, vocab, device=bench.device).bfloat16()
    keys = torch.arange(rows, device=bench.device)[:, None]
    settings = RowSampling((law,) * rows).settings(bench.device)
    given = logits, keys, settings, True
    backend = RecordingBackend(bench.device, fuses=True)
    ways = {"sorted": backend.fused(draw), "ours": backend.fused(backend.replacement_of(draw))}
    ways = ways if bench.device.type == "cuda" else {"sorted": draw}
    found: dict[str, Any] = {
        name: tried(lambda f=function: f(*given), bench.device) for name, function in ways.items()
    }
    if "ours" in ways:
        found["differ"] = int((ways["sorted"](*given) != ways["ours"](*given)).sum())
    return found


def products(bench: Bench, inputs: int, outputs: int) -> dict[str, float]:
    """A product of M rows with weights that are not in the cache, by M."""
    count = max(2, min(24, bench.size(2**28, 2**14) // (inputs * outputs * 2)))
    make = {"device": bench.device, "dtype": torch.bfloat16}
    weights = [torch.randn(outputs, inputs, **make) for _ in range(count)]
    taken = {}
    for rows in (1, 4, 16, 64, 256):
        x = torch.randn(rows, inputs, **make)
        calls = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights]
        taken[str(rows)] = round(
            graphed(lambda c=calls: [f() for f in c], bench.device, 5) / count, 2
        )
    return taken


def attention(
    bench: Bench, rows: int, heads: int, key_heads: int, width: int, columns: int, nodes: int
) -> dict[str, Any]:
    """Ways of attending from a tree's nodes to a cache: microseconds, and errors of ours."""
    make = {"device": bench.device, "dtype": torch.bfloat16}
    query = torch.randn(rows, heads, nodes, width, **make)
    keys, values = (torch.randn(rows, key_heads, columns + 64, width, **make) for _ in range(2))
    lengths = torch.full((rows,), columns, device=bench.device)
    steps = torch.arange(nodes, device=bench.device)
    visible = (steps[:, None] >= steps)[None]
    seen = torch.arange(columns + nodes, device=bench.device)
    own = torch.arange(nodes, device=bench.device)[:, None] + columns
    mask = torch.zeros(rows, 1, nodes, columns + nodes, **make)
    mask.masked_fill_(seen > own, torch.finfo(mask.dtype).min)
    groups, end = heads // key_heads, columns + nodes

    def repeated() -> torch.Tensor:
        """As transformers calls it with a mask: keys and values once for each query head."""
        k, v = (part[:, :, :end].repeat_interleave(groups, 1) for part in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, mask)

    def grouped() -> torch.Tensor:
        """Without copies, for kernels that take groups."""
        k, v = keys[:, :, :end], values[:, :, :end]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, k, v, mask, enable_gqa=True)

    def unmasked() -> torch.Tensor:
        """What flash attention takes for the same work without a tree."""
        k, v = keys[:, :, :end], values[:, :, :end]
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "repeated": repeated, "grouped": grouped, "unmasked": unmasked
    }  # fmt: skip
    if bench.device.type == "cuda":
        from drafthead.backends.cuda.registration import sights

        new = (part[:, :, columns:end].contiguous() for part in (keys, values))
        sight = sights(visible, lengths, lengths, (LayerKind("full_attention"),))
        given = query, keys, values, *new, sight, width**-0.5, 0, None, None
        ways["ours"] = lambda: torch.ops.drafthead.tree_attention(*given)
    found: dict[str, Any] = {name: tried(call, bench.device) for name, call in ways.items()}
    if "ours" in ways and isinstance(found["ours"], float):
        exact = reference(query, keys[:, :, :end], values[:, :, :end], mask, groups)
        got = ways["ours"]().view(rows, nodes, heads, width).transpose(1, 2).double()
        found["error"] = float((got - exact).norm() / exact.norm())
        theirs = repeated().double()
        found["error of repeated"] = float((theirs - exact).norm() / exact.norm())
    return found


def reference(
    query: torch.Tensor,  # [B, H, N, D]
    keys: torch.Tensor,  # [B, G, S, D]
    values: torch.Tensor,  # [B, G, S, D]
    mask: torch.Tensor,  # [B, 1, N, S]
    groups: int,
) -> torch.Tensor:
    """Attention [B, H, N, D] in double precision."""
    q, k, v = (part.double() for part in (query, keys, values))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask.double()
    return scores.softmax(-1) @ v


def tried(call: Callable[[], object], device: torch.device) -> float | str:
    """Microseconds of a call, or why it cannot be made."""
    try:
        return graphed(call, device)
    except Exception as error:
        return f"failed: {str(error)[:160]}"


# Phases over whole models.


def bound(target: Target) -> float:
    """The milliseconds in which the weights of a plain pass are read once."""
    return milliseconds(weight_bytes(target, 1) / copy_bandwidth(target.device))


def large(bench: Bench) -> None:
    """The largest shape: plain steps and steps with an EAGLE-3 head, compiled."""
    name = bench.names[-1]
    target = bench.model(name)
    bench.measure(f"{name} bound_ms", lambda: bound(target))
    whole(bench, name, {"eagle3": (16, 64)})


def small(bench: Bench) -> None:
    """SmolLM2's shape: plain steps and steps with heads of three families, compiled."""
    target = bench.model("SmolLM2")
    bench.measure("SmolLM2 bound_ms", lambda: bound(target))
    bench.measure("SmolLM2 generate", lambda: generated(bench, target))
    whole(bench, "SmolLM2", {"eagle3": (16, 64), "parallel": (16,), "medusa": (16,)})


def whole(bench: Bench, name: str, kinds: dict[str, tuple[int, ...]]) -> None:
    """Steps of one row after 256 tokens, compiled: plain ones, and with heads over trees of sizes.

    The target is compiled once, and each head once.
    """
    plain = decoder_for(bench.model(name), None, None, True)
    bench.measure(f"{name} plain", lambda: stepped(bench, plain, 1, 256))
    for kind, sizes in kinds.items():
        decoder = with_random_head(bench, kind, plain.target)
        for nodes in sizes:
            bench.measure(
                f"{name} {kind} N={nodes}",
                lambda d=decoder, n=nodes: stepped(bench, over_trees(bench, d, n), 1, 256),
            )


def with_random_head(bench: Bench, family: str, target: Target) -> Decoder:
    """A decoder for a compiled target with a head of random weights."""
    own: dict[str, Any] = {"depth": 6} if family == "eagle3" else {}
    if family != "medusa":
        own["draft_vocab_size"] = min(32768, target.vocab_size // 2)
    head = random_head(family, target, **own)
    head.path_counts = {(): 100} | {
        (0,) * length: round(100 * UNMEASURED_ALPHA**length) for length in range(1, head.depth + 1)
    }
    return decoder_for(target, drafter_for(head, target), None, True)


def over_trees(bench: Bench, decoder: Decoder, nodes: int) -> Decoder:
    """The decoder with trees of so many nodes at each step, and no planner."""
    nodes = bench.size(nodes, 8)
    assert decoder.drafter is not None
    decoder.plans, decoder.budget = None, decoder.drafter.budgets[-1].of_nodes(nodes)
    return decoder


def generated(bench: Bench, target: Target, cache: str | None = None) -> dict[str, float]:
    """Milliseconds a token of `model.generate`, and of its first token."""
    ids = prompt_of(target, bench.size(256, 8), 1)
    options = {} if cache is None else {"cache_implementation": cache}
    count = bench.size(48, 4)

    def answer(tokens: int) -> float:
        """Seconds of an answer of so many tokens."""

        def call() -> None:
            target.model.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
            )

        return seconds_of(call, target.device)

    first_call, _ = answer(count), answer(1)
    one, many = median(answer(1) for _ in range(3)), median(answer(count) for _ in range(3))
    return {
        "ms_per_token": milliseconds((many - one) / (count - 1)),
        "first_token_ms": milliseconds(one),
        "first_call_s": round(first_call, 2),
    }


def prompt_of(target: Target, length: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Random ids [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(target.vocab_size, (rows, length), generator=generator).to(target.device)


def stepped(bench: Bench, decoder: Decoder, rows: int, columns: int, **options: Any) -> Any:
    """Milliseconds of a step after `columns` tokens and of a first token, and of its graphs.

    The first call also records, and compiles what is compiled.
    """
    decoder.end_ids = frozenset()
    columns, steps = bench.size(columns, 8), bench.size(40, 3)
    prompts = prompt_of(decoder.target, columns, rows).tolist()
    ask = {"max_new_tokens": 8 * (steps + 40), **options}
    started = time.perf_counter()
    first = decoder.steps(prompts, **ask)
    next(first)
    first_token = time.perf_counter() - started
    for _ in islice(first, 4):
        pass
    first_call = time.perf_counter() - started
    running = decoder.steps(prompts, **ask)
    prompt_seconds = seconds_of(lambda: next(running), bench.device)
    for _ in islice(running, bench.size(12, 1)):
        pass
    taken = [seconds_of(lambda: next(running), bench.device) for _ in range(steps)]
    in_row = seconds_of(lambda: list(islice(running, steps)), bench.device) / steps
    return {
        "step_ms": milliseconds(in_row),
        "step_alone_ms": milliseconds(median(taken)),
        "prompt_ms": milliseconds(prompt_seconds),
        "first_call_first_token_s": round(first_token, 3),
        "first_call_s": round(first_call, 3),
        "tau": round(running.stats.tau, 3),
        "graphs": graphs(decoder, running),
    }


def graphs(decoder: Decoder, running: Iterator[Any]) -> dict[str, dict[str, Any]]:
    """Of each graph that a step replays: its milliseconds and its kernels.

    What a step takes beyond its graphs is the host's, and gaps. The values of the run are lost.
    """
    used: dict[int, Recording] = {}
    repeated = Recording.repeated

    def noted(self: Recording, leaves: Sequence[torch.Tensor]) -> Any:
        """The value of the call; remembers the recording."""
        used[id(self)] = self
        return repeated(self, leaves)

    with mock.patch.object(Recording, "repeated", noted):
        list(islice(running, 2))
    made = [
        *decoder.target.backend.made,
        *getattr(getattr(decoder.drafter, "backend", None), "made", ()),
    ]
    names = {
        id(recording): getattr(each.function, "__qualname__", "function")
        for each in made
        for recording in each.recordings.values()
    }
    return {
        f"{names.get(key, '?')} {[list(place.shape) for place in recording.places[:2]]}": replayed(
            recording, decoder.target.device
        )
        for key, recording in used.items()
    }


def replayed(recording: Recording, device: torch.device, calls: int = 20) -> dict[str, Any]:
    """Milliseconds of a graph, replays in a row, and of the kernels of one, and their number."""

    def many() -> None:
        for _ in range(calls):
            recording.replay()

    many()
    found: dict[str, Any] = {"ms": milliseconds(seconds_of(many, device) / calls)}
    if device.type != "cuda":
        return found
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        recording.replay()
        torch.cuda.synchronize()
    rows = [e for e in profiled.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: e.self_device_time_total, reverse=True)
    return found | {
        "kernel_ms": milliseconds(1e-6 * sum(e.self_device_time_total for e in rows)),
        "kernels": sum(e.count for e in rows),
        "longest": {
            e.key[:48]: [milliseconds(1e-6 * e.self_device_time_total), e.count] for e in rows[:8]
        },
    }


def rows(bench: Bench) -> None:
    """Sixteen rows of the largest shape, 1,024 tokens each: plain, and with an EAGLE-3 head."""
    name, count = bench.names[-1], bench.size(16, 2)
    plain = decoder_for(bench.model(name), None, None, True)
    bench.measure(f"{name} plain B={count}", lambda: stepped(bench, plain, count, 1024))
    decoder = with_random_head(bench, "eagle3", plain.target)
    bench.measure(
        f"{name} eagle3 N=16 B={count}",
        lambda: stepped(bench, over_trees(bench, decoder, 16), count, 1024),
    )


def long_texts(bench: Bench) -> None:
    """The first token after long prompts with a head, beside transformers'."""
    name = bench.names[-1]
    plain = decoder_for(bench.model(name), None, None, True)
    decoder = over_trees(bench, with_random_head(bench, "eagle3", plain.target), 16)
    for columns in (16,) if bench.rehearse else (256, 8192, 32_000):
        bench.measure(
            f"{name} first token ms S={columns}", lambda c=columns: first_token(bench, decoder, c)
        )
        bench.measure(
            f"{name} generate first token ms S={columns}",
            lambda c=columns: first_token_of_generate(bench, plain.target, c),
        )


def first_token(bench: Bench, decoder: Decoder, columns: int) -> float:
    """Milliseconds of the first token with a head, after a first call."""
    prompts = prompt_of(decoder.target, bench.size(columns, 16), 1).tolist()

    def call() -> None:
        next(decoder.steps(prompts, max_new_tokens=8))

    call()
    return milliseconds(median(seconds_of(call, bench.device) for _ in range(2)))


def first_token_of_generate(bench: Bench, target: Target, columns: int) -> float:
    """Milliseconds of the first token of `model.generate`, after a first call."""
    ids = prompt_of(target, bench.size(columns, 16), 1)

    def call() -> None:
        target.model.generate(ids, max_new_tokens=1, do_sample=False)

    call()
    return milliseconds(median(seconds_of(call, bench.device) for _ in range(2)))


def static(bench: Bench) -> None:
    """`model.generate` with a static cache, which transformers compiles by itself."""
    for name in bench.names:
        target = bench.model(name)
        bench.measure(
            f"{name} generate, static cache", lambda t=target: generated(bench, t, "static")
        )


@torch.library.custom_op("benchmark::gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [..., I], as an operation that torch's code generator fuses with nothing."""
    return torch.nn.functional.silu(gate) * up


@gated.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout."""
    return torch.empty_like(gate)


def gate_apart(mlp: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
    """`LlamaMLP.forward` of x [..., D] whose last product reads a tensor that lies in memory."""
    down: torch.Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    return down


def options(bench: Bench) -> None:
    """Plain steps of the largest shape, compiled in other ways."""
    name, usual = bench.names[-1], compiled_layers.OPTIONS

    def steps() -> Any:
        return stepped(bench, decoder_for(bench.model(name), None, None, True), 1, 256)

    with mock.patch.object(LlamaMLP, "forward", gate_apart):
        bench.measure(f"{name} plain, the last product apart from silu", steps)
    for way, own in {
        "dependent launch": {"triton.enable_pdl": True},
        "without tuning": {"coordinate_descent_tuning": False},
    }.items():
        with mock.patch.object(compiled_layers, "OPTIONS", usual | own):
            bench.measure(f"{name} plain, {way}", steps)


class Real:
    """A real model with real prompts, and the texts that plain decoding gave for them."""

    def __init__(self, bench: Bench):
        """As many prompts as a phase takes, spread over the file."""
        self.bench, self.tokens = bench, bench.size(128, 8)
        self.target = load_decoder_only(bench.target, device=str(bench.device))
        count = bench.size(24, 2)
        conversations = list(read_conversations(bench.prompts, limit=480))
        chosen = conversations[:: max(1, len(conversations) // count)][:count]
        assert self.target.tokenizer is not None
        self.ids = encode([c.messages[:1] for c in chosen], self.target.tokenizer)
        self.plain_texts: dict[str, list[list[int]]] = {}
        self.wide_texts: list[list[int]] = []  # of passes as wide as trees

    def raced(self, decoder: Decoder, is_plain: bool, **ask: Any) -> dict[str, Any]:
        """Figures of one way of decoding, after it has recorded and learnt what its steps take."""
        if decoder.plans is not None:
            decoder.warm_up()
        decoder.generate(self.ids[0], max_new_tokens=40, **ask)
        results, seconds = [], 0.0
        for number, prompt in enumerate(self.ids):
            taken = time.perf_counter()
            result = decoder.generate(prompt, max_new_tokens=self.tokens, seed=number, **ask)
            seconds += time.perf_counter() - taken
            results.append(result)
        answers = [result.sequences[0] for result in results]
        key = json.dumps(ask)
        if is_plain:
            self.plain_texts[key] = answers
        if isinstance(decoder.drafter, Blank):
            self.wide_texts = answers
        stats = [result.stats for result in results]
        after_first = sum(sum(each.decoded_tokens) for each in stats)
        others = {"plain": self.plain_texts.get(key), "16 nodes wide": self.wide_texts}
        return {
            "tokens_per_second": round(sum(map(len, answers)) / seconds, 1),
            "after_the_prompt": round(after_first / sum(each.decode_seconds for each in stats), 1),
            "prompt_ms": milliseconds(median(each.seconds["prefill"] for each in stats)),
            "tau": round(after_first / sum(len(each.accept_lengths[0]) for each in stats), 3),
            "nodes": round(sum(e.verified_nodes for e in stats) / sum(e.steps for e in stats), 1),
        } | {
            f"answers unlike {name}": sum(a != b for a, b in zip(answers, texts, strict=True))
            for name, texts in others.items()
            if texts and (name == "plain" or not ask)
        }

    def generated(self, count: int, **options: Any) -> dict[str, float]:
        """Tokens per second of `model.generate`, prompts counted."""
        made, seconds = 0, 0.0
        # The longest first, as a warm-up: a static cache that is large enough is kept.
        longest = max(self.ids, key=len)
        for number, prompt in enumerate([longest, longest, *self.ids[:count]]):
            given = torch.tensor([prompt], device=self.target.device)
            taken = time.perf_counter()
            answer = self.target.model.generate(
                given, max_new_tokens=self.tokens, do_sample=False, **options
            ).tolist()
            if number > 1:
                seconds += time.perf_counter() - taken
                made += len(answer[0]) - len(prompt)
        return {"tokens_per_second": round(made / seconds, 1)}


def real(bench: Bench) -> None:
    """A real model with its head, on real prompts, compiled: planned, with lookup, drawn, trees of
    one size; and which answers leave those of plain passes, of one node and of as many as trees.
    """
    text = Real(bench)
    plain = Decoder.from_pretrained(text.target, compile=True)
    drawn = {"temperature": 0.7, "top_p": 0.9}
    bench.measure("plain", lambda: text.raced(plain, True))
    if bench.head is not None:
        head = Decoder.from_pretrained(plain.target, draft=bench.head, compile=True)
        bench.measure("head, planned", lambda: text.raced(head, False))
        both = Decoder.from_pretrained(plain.target, draft=[bench.head, "lookup"], compile=True)
        bench.measure("head + lookup, planned", lambda: text.raced(both, False))
    # Which of the answers that leave plain decoding's do so by the number of rows of products?
    wide = Blank(bench.size(16, 8))
    bench.measure(
        "plain, 16 nodes wide",
        lambda: text.raced(Decoder(plain.target, wide, wide.budgets[0]), False),
    )
    bench.measure("plain, T = 0.7", lambda: text.raced(plain, True, **drawn))
    if bench.head is not None:
        bench.measure("head, planned, T = 0.7", lambda: text.raced(head, False, **drawn))
    lookup = Decoder.from_pretrained(plain.target, draft="lookup", compile=True)
    bench.measure("lookup, planned", lambda: text.raced(lookup, False))
    bench.measure("generate", lambda: text.generated(bench.size(4, 1)))
    if bench.head is not None:
        bench.measure("head, 16 nodes", lambda: text.raced(over_trees(bench, head, 16), False))


class Blank(Drafter):
    """Trees in which nothing but the root is a token: plain decoding by passes of so many nodes."""

    features = FeatureSpec(layers=(), last=False)

    def __init__(self, nodes: int):
        self.budgets = (Budget(nodes, nodes - 1),)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        return BlankSession()


class BlankSession(OnDevice):
    """A session that knows the root."""

    def commit(self, committed: Committed) -> None:
        self.roots = committed.ends.roots[:, None]

    def propose(self, budget: Budget, sampling: Any, random: Any) -> TokenTree:
        tokens = torch.nn.functional.pad(self.roots, (0, budget.nodes - 1), value=PADDING)
        return TokenTree.from_shape(TreeShape.chain(budget.nodes - 1), tokens)


def real_static(bench: Bench) -> None:
    """`model.generate` with a static cache on the prompts of `real`."""
    text = Real(bench)
    bench.measure(
        "generate, static cache",
        lambda: text.generated(bench.size(6, 1), cache_implementation="static"),
    )


def recorded(bench: Bench) -> None:
    """A real model recorded without being compiled: plain, and with its head."""
    text = Real(bench)
    plain = Decoder.from_pretrained(text.target)
    bench.measure("plain, recorded", lambda: text.raced(plain, True))
    if bench.head is not None:
        head = Decoder.from_pretrained(plain.target, draft=bench.head)
        bench.measure(
            "head, 16 nodes, recorded", lambda: text.raced(over_trees(bench, head, 16), False)
        )


def tests(bench: Bench) -> None:
    """The GPU tests: those of the kernels alone, and of decoding in several processes."""
    files = {"kernels": "tests/backends/cuda", "decoding": "tests/infer/engine/test_on_gpu.py"}
    for name, path in files.items():
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
            *(("--collect-only",) if bench.rehearse else ()),
            *(("--numprocesses", "4") if not bench.rehearse and name == "decoding" else ()),
            path,
        ]
        bench.measure(f"pytest {name}", lambda c=command: ended(bench, c))


def ended(bench: Bench, command: Sequence[str]) -> dict[str, Any]:
    """How a command ended within the time that is left; raises RuntimeError where it failed."""
    left = bench.ends_at - time.perf_counter() - LEAST_LEFT
    run = subprocess.run(command, capture_output=True, text=True, timeout=left)
    lines = run.stdout.splitlines()[-12:]
    if run.returncode:
        raise RuntimeError("\n".join([f"exit {run.returncode}", *lines, run.stderr[-600:]]))
    return {"exit": run.returncode, "end": lines}


def build(bench: Bench) -> None:
    """From a model to a head in a quarter of an hour; the same call goes on where one was cut."""
    folder = bench.output / "build"
    command = [
        *(sys.executable, "-m", "drafthead.scripts.cli", "build", "--target", bench.target),
        *("--minutes", f"{bench.build_minutes:g}", "--output", str(folder)),
        *(["--device", "cpu", "--plan"] if bench.rehearse else []),
    ]
    left = bench.ends_at - time.perf_counter() - LEAST_LEFT

    def run() -> dict[str, Any]:
        """How the build ended, and what its record says."""
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=left)
            found = {"exit": ended.returncode, "end": ended.stdout.splitlines()[-12:]}
            if ended.returncode:
                found["failed"] = ended.stderr[-900:]
        except subprocess.TimeoutExpired:
            found = {"cut off after": left}
        record = folder / RECORD  # which a plan does not write
        return found | (yaml.safe_load(record.read_text()) if record.exists() else {})

    bench.measure("build", run)


PHASES: dict[str, Callable[[Bench], None]] = {
    "facts": facts,
    "kernels": kernels,
    "large": large,
    "small": small,
    "rows": rows,
    "long_texts": long_texts,
    "options": options,
    "real": real,
    "recorded": recorded,
    "static": static,
    "real_static": real_static,
    "tests": tests,
    "build": build,
}


def record_by_stand_ins() -> None:
    """Let passes be recorded without a GPU: a repetition calls the function again.

    Kernels for CPUs stay away.
    """
    mock.patch("drafthead.backends.cpu.kernels.library.kernel_set", lambda: None).start()
    mock.patch("drafthead.infer.loading.loaded.is_recorded_on", lambda device: True).start()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import pytest
    from rehearsal import rehearse

    rehearse(pytest.MonkeyPatch())


@contextmanager
def phase(bench: Bench, name: str) -> Iterator[None]:
    """A phase's file; what goes wrong in it is noted there, and the next phase runs."""
    bench.path, bench.found = bench.output / f"{name}.json", {}
    bench.found["device"] = describe_machine()["processor"]
    print(f"== {name}", flush=True)
    try:
        yield
    except OutOfTimeError as error:
        bench.found["ended before"] = str(error)
    except Exception as error:
        logger.exception("phase %s", name)
        bench.found["failed"] = f"{type(error).__name__}: {error}"[:400]
    bench.write()


def main(
    phases: Annotated[str, typer.Option(help=f"Some of: {','.join(PHASES)}.")] = ",".join(PHASES),
    begin: Annotated[
        str | None, typer.Option("--from", help="Leave out the phases before this one.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds after which nothing is begun.")] = 400.0,
    output: Annotated[Path, typer.Option(help="Folder for one JSON file a phase.")] = Path(
        "benchmarks/gpu"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="Measure what has this in its name; may be repeated.")
    ] = None,
    build_minutes: Annotated[float, typer.Option(help="Time of phase `build`.")] = 15.0,
    rehearse: Annotated[bool, typer.Option(help="Tiny shapes on a CPU.")] = False,
    target: Annotated[str, typer.Option(help="The model of phase `real`.")] = "smollm2",
    head: Annotated[
        str | None, typer.Option(help="A head for it, such as assets/smollm2_eagle3.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="Prompts for it.")] = (
        "assets/smollm2_prompts/test.jsonl"
    ),
) -> None:
    """Run phases; exit 1 if a measurement failed."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    names = [name for name in phases.split(",") if name]
    if unknown := [name for name in names if name not in PHASES]:
        raise typer.BadParameter(f"there is no phase {unknown[0]}: {', '.join(PHASES)}")
    names = names[names.index(begin) :] if begin else names
    device = torch.device("cpu" if rehearse else "cuda")
    if rehearse:
        record_by_stand_ins()
    else:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    output.mkdir(parents=True, exist_ok=True)
    ends_at = time.perf_counter() + deadline
    named = target, head, prompts
    bench = Bench(device, output, rehearse, ends_at, *named, build_minutes, only or ())
    failed = []
    for name in names:
        with torch.no_grad(), phase(bench, name):
            PHASES[name](bench)
        failed += [
            f"{name}: {key}"
            for key, value in bench.found.items()
            if key == "failed" or (isinstance(value, dict) and "failed" in value)
        ]
    print("\n".join([f"{len(failed)} failed", *failed]))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
