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

import torch
import typer
import yaml
from random_models import SHAPES, random_head, random_llama
from scripted import Scripted

from drafthead.heads.backend import backend_for
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.sampling import SamplingConfig, draw
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.any_target import load_decoder_only
from drafthead.heads.target.masks import LayerKind
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import UNMEASURED_ALPHA, Budget
from drafthead.infer import Decoder
from drafthead.infer.decoder import decoder_for
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.request.prompts import encode
from drafthead.lab.building.folder import RECORD
from drafthead.lab.profiling.bandwidth import copy_bandwidth, weight_bytes
from drafthead.lab.profiling.pass_times import seconds_of, time_passes
from drafthead.train.data.conversations import read_conversations

LAWS = {
    "top-p 0.9": SamplingConfig(1.0, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingConfig(1.0, top_k=50, top_p=0.9),
}
NODES = (1, 2, 4, 8, 16, 32, 64)
TREES = ((4, 3), (8, 4), (16, 6), (32, 6), (64, 6))  # nodes and depth
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
    given = logits, keys, keys, keys, law.settings(bench.device), True
    backend = backend_for(bench.device, torch.bfloat16)
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


def one_row(bench: Bench) -> None:
    """Plain decoding of one row: transformers, ours as it is, recorded, with compiled layers."""
    for name in bench.names:
        target = bench.model(name)
        bench.measure(f"{name} bound_ms", lambda t=target: bound(t))
        bench.measure(f"{name} generate", lambda t=target: generated(bench, t))
        for way, compile in (("as it is", False), ("recorded", None), ("compiled layers", True)):
            if bench.rehearse and compile:
                continue
            bench.measure(
                f"{name} {way}",
                lambda t=target, c=compile: plain(bench, decoder_for(t, None, None, c)),
            )


def bound(target: Target) -> float:
    """The milliseconds in which the weights of a plain pass are read once."""
    return milliseconds(weight_bytes(target, 1) / copy_bandwidth(target.device))


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


def plain(bench: Bench, decoder: Decoder, rows: int = 1, columns: int = 256) -> dict[str, Any]:
    """Figures of plain decoding after `columns` tokens: see `stepped`."""
    decoder.end_ids = frozenset()
    return stepped(bench, decoder, rows, columns)


def stepped(bench: Bench, decoder: Decoder, rows: int, columns: int, **options: Any) -> Any:
    """Milliseconds of a step and of a first token, kernels of a step and the host's share.

    The first call also records, and compiles what is compiled.
    """
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
    found = {
        "step_ms": milliseconds(in_row),
        "step_alone_ms": milliseconds(median(taken)),
        "prompt_ms": milliseconds(prompt_seconds),
        "first_call_first_token_s": round(first_token, 3),
        "first_call_s": round(first_call, 3),
        "tau": round(running.stats.tau, 3),
    }
    return found | busy(bench, running)


def busy(bench: Bench, running: Iterator[Any], steps: int = 6) -> dict[str, Any]:
    """Milliseconds of a step in which the GPU works, its kernels, and those that take longest."""
    if bench.device.type != "cuda":
        list(islice(running, 2))
        return {}
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        list(islice(running, steps))
        torch.cuda.synchronize()
    rows = [e for e in profiled.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: e.self_device_time_total, reverse=True)
    total = sum(e.self_device_time_total for e in rows) / 1000 / steps
    longest = {
        e.key[:60]: [round(e.self_device_time_total / 1000 / steps, 4), round(e.count / steps, 1)]
        for e in rows[:12]
    }
    return {
        "kernel_ms": round(total, 3),
        "kernels": round(sum(e.count for e in rows) / steps, 1),
        "longest": longest,
    }


def passes(bench: Bench) -> None:
    """The pass of the target alone, by nodes, recorded and with compiled layers."""
    for name in bench.names:
        for way, compile in (("recorded", None), ("compiled layers", True)):
            if bench.rehearse and compile:
                continue
            decoder = decoder_for(bench.model(name), None, None, compile)
            sizes = NODES if not bench.rehearse else (1, 4)
            bench.measure(
                f"{name} {way} ms",
                lambda d=decoder, s=sizes: {
                    str(n): milliseconds(seconds)
                    for n, seconds in time_passes(d.target, sizes=s, rounds=7).verify.items()
                },
            )


def heads(bench: Bench) -> None:
    """Steps with heads of random weights: the whole, and the draft alone."""
    options = {"eagle3": {"depth": 6}, "eagle3 of 2 layers": {"depth": 6, "num_layers": 2}}
    for name in bench.names:
        target = bench.model(name)
        for kind in ("eagle3", "eagle3 of 2 layers", "parallel", "medusa"):
            own = dict(options.get(kind, {}))
            if kind != "medusa":
                own["draft_vocab_size"] = min(32768, target.vocab_size // 2)
            family = kind.split()[0]
            for way, compile in (("recorded", None), ("compiled layers", True)):
                if bench.rehearse and compile:
                    continue
                for nodes, depth in TREES if way == "recorded" else TREES[2:3]:
                    if bench.rehearse and nodes > 8:
                        continue
                    bench.measure(
                        f"{name} {kind} {way} N={nodes}",
                        lambda f=family, o=own, t=target, n=nodes, d=depth, c=compile: with_head(
                            bench, f, o, t, Budget(n, d), c
                        ),
                    )


def with_head(
    bench: Bench, family: str, own: dict[str, Any], target: Target, budget: Budget, compile: Any
) -> Any:
    """Figures of steps with a random head within a budget."""
    head = random_head(family, target, **own)
    depth = min(budget.depth, head.depth)
    head.path_counts = {(): 100} | {
        (0,) * length: round(100 * UNMEASURED_ALPHA**length) for length in range(1, depth + 1)
    }
    drafter = drafter_for(head, target)
    return drafted(bench, target, drafter, Budget(budget.nodes, depth), compile, 1, 256)


def drafted(
    bench: Bench,
    target: Target,
    drafter: Drafter,
    budget: Budget,
    compile: bool | None,
    rows: int,
    columns: int,
) -> Any:
    """Figures of steps over trees of one size: see `stepped`."""
    decoder = decoder_for(target, drafter, None, compile)
    decoder.plans, decoder.budget = None, budget
    decoder.end_ids = frozenset()
    return stepped(bench, decoder, rows, columns)


def batches(bench: Bench) -> None:
    """Several rows, 1,024 tokens each: plain, and trees of 16 nodes from a script."""
    for name in bench.names:
        target = bench.model(name)
        for rows in (2,) if bench.rehearse else (4, 16, 64):
            decoder = decoder_for(target, None, None, None if bench.rehearse else True)
            bench.measure(
                f"{name} plain B={rows}",
                lambda d=decoder, r=rows: plain(bench, d, r, 1024),
            )
            bench.measure(
                f"{name} 16 nodes B={rows}",
                lambda t=target, r=rows: scripted(bench, t, r),
            )


def scripted(bench: Bench, target: Target, rows: int) -> Any:
    """Figures of steps over trees of 16 nodes that a script proposes."""
    drafter: Drafter = Scripted([[1] * 4096] * rows, 0.5, 6, target.vocab_size)
    compile = None if bench.rehearse else True
    return drafted(bench, target, drafter, Budget(16, 6), compile, rows, 1024)


def long_texts(bench: Bench) -> None:
    """One row after 8,192 and 32,000 tokens, beside transformers' first token."""
    for name in bench.names:
        target = bench.model(name)
        for columns in (16,) if bench.rehearse else (1024, 8192, 32_000):
            decoder = decoder_for(target, None, None, None if bench.rehearse else True)
            bench.measure(
                f"{name} plain S={columns}",
                lambda d=decoder, c=columns: plain(bench, d, 1, c),
            )
            bench.measure(
                f"{name} generate first token ms S={columns}",
                lambda t=target, c=columns: first_token(bench, t, c),
            )


def first_token(bench: Bench, target: Target, columns: int) -> float:
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


def real(bench: Bench) -> None:
    """A real model with its head, on real prompts: tokens/s, tau, and texts beside plain ones."""
    target = load_decoder_only(bench.target, device=str(bench.device))
    count, tokens = bench.size(24, 2), bench.size(128, 8)
    conversations = list(read_conversations(bench.prompts, limit=400))
    step = max(1, len(conversations) // count)
    prompts = [c.messages[:1] for c in conversations[::step][:count]]
    assert target.tokenizer is not None
    ids = encode(prompts, target.tokenizer)
    ways: dict[str, dict[str, Any]] = {"plain": {}, "lookup": {"draft": "lookup"}}
    best = "lookup"
    if bench.head is not None:
        best = "head + lookup"
        ways |= {"head": {"draft": bench.head}, best: {"draft": [bench.head, "lookup"]}}
    sequences: dict[str, Any] = {}

    def raced(options: dict[str, Any], compile: Any, **ask: Any) -> dict[str, Any]:
        """Figures of one way of decoding, after it has learnt what its steps take."""
        decoder = Decoder.from_pretrained(target, compile=compile, **options)
        decoder.warm_up()
        seconds, made, steps, answers = 0.0, 0, 0, []
        for prompt in ids:
            taken = time.perf_counter()
            result = decoder.generate(prompt, max_new_tokens=tokens, **ask)
            seconds += time.perf_counter() - taken
            answers.append(result.sequences[0])
            made += len(answers[-1])
            steps += len(result.stats.accept_lengths[0]) + 1
        sequences[json.dumps([*map(str, (options, compile, ask))])] = answers
        plain_key = json.dumps([*map(str, ({}, compile, ask))])
        reference = sequences.get(plain_key, answers)
        return {
            "tokens_per_second": round(made / seconds, 1),
            "tau": round(made / steps, 3),
            "answers unlike plain": sum(a != b for a, b in zip(answers, reference, strict=True)),
        }

    bench.measure("generate", lambda: real_generate(target, ids, tokens))
    drawn = {"temperature": 0.7, "top_p": 0.9}
    for way in ("plain", best):
        bench.measure(f"{way}, recorded", lambda o=ways[way]: raced(o, None))
    how = None if bench.rehearse else True
    for way, options in ways.items():
        bench.measure(f"{way}, compiled layers", lambda o=options: raced(o, how))
    for way in ("plain", best):
        bench.measure(f"{way}, T = 0.7, top-p 0.9", lambda o=ways[way]: raced(o, how, **drawn))


def real_generate(target: Target, ids: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Tokens per second of `model.generate`, prompts counted."""
    made, seconds = 0, 0.0
    for number, prompt in enumerate(ids[:7]):
        given = torch.tensor([prompt], device=target.device)

        def call(given: torch.Tensor = given) -> None:
            nonlocal made
            answer = target.model.generate(given, max_new_tokens=tokens, do_sample=False)
            made += answer.shape[1] - given.shape[1]

        taken = seconds_of(call, target.device)
        if number == 0:  # the first call is a warm-up
            made = 0
        else:
            seconds += taken
    return {"tokens_per_second": round(made / seconds, 1)}


def tests(bench: Bench) -> None:
    """The GPU tests, in several processes."""
    folder = bench.output / "tests"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
        *(("--collect-only",) if bench.rehearse else ("--numprocesses", "4")),
        *("--junitxml", f"{folder}.xml", "tests/infer/engine/test_on_gpu.py"),
    ]
    left = bench.ends_at - time.perf_counter() - LEAST_LEFT

    def run() -> dict[str, Any]:
        """How the tests ended."""
        ended = subprocess.run(command, capture_output=True, text=True, timeout=left)
        return {"exit": ended.returncode, "end": ended.stdout.splitlines()[-12:]}

    bench.measure("pytest", run)


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
        return found | yaml.safe_load((folder / RECORD).read_text())

    bench.measure("build", run)


PHASES: dict[str, Callable[[Bench], None]] = {
    "facts": facts,
    "kernels": kernels,
    "one_row": one_row,
    "passes": passes,
    "heads": heads,
    "batches": batches,
    "long_texts": long_texts,
    "real": real,
    "static": static,
    "tests": tests,
    "build": build,
}


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
    if not rehearse:
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
