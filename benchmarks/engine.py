"""Measures the engine: `python benchmarks/engine.py --head runs/demo/medusa`.

On the demo target and on a random Llama of 91M parameters: compiled plain decoding against
`model.generate` and against the machine's bandwidth, the cost of a step outside its passes,
batches, a drafter that is always wrong, and the sampling rules. All that is compared takes turns.
"""

import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import typer
from random_models import random_llama
from scripted import Scripted
from tqdm import tqdm

from drafthead.backends.compiled_target import CompiledTarget
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.formats.loading import load_head
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.loading import device_named
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget
from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.batch_run import Emitted
from drafthead.infer.engine.results import DecodeResult, DecodeStats, Stream
from drafthead.infer.loaded import head_drafter
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.request.prompts import encode_one
from drafthead.lab.profiling.bandwidth import copy_bandwidth, weight_bytes
from drafthead.lab.profiling.pass_times import time_passes
from drafthead.lab.races.contestants import Transformers
from drafthead.train.data.conversations import read_conversations

PASSES = (1, 16, 64)  # nodes of the passes that are timed alone
TURN = 16  # tokens per row that are decoded in one turn
RULES = ("match", "rejection", "traversal")  # the lossless ones above temperature 0


Rates = dict[str, list[list[float]]]  # of each contestant, by round and item
Decoding = Stream[Emitted]  # not yet started


def interleaved(
    contestants: dict[str, Callable[[int], float]], rounds: int, items: int, title: str
) -> Rates:
    """Rates of each contestant; the contestants take turns on every item, in random order."""
    order = random.Random(0)
    rates: Rates = {name: [] for name in contestants}
    for name in contestants:  # warm-up: compiling, planning
        contestants[name](0)
    with tqdm(total=rounds * items * len(contestants), desc=title) as bar:
        for _ in range(rounds):
            for name in contestants:
                rates[name].append([])
            for item in range(items):
                for name in order.sample(list(contestants), len(contestants)):
                    rates[name][-1].append(contestants[name](item))
                    bar.update()
    return rates


def middle(rates: list[list[float]]) -> float:
    """Median over rounds and items."""
    return median(chain.from_iterable(rates))


def ratios(rates: Rates, of: str, over: str) -> dict[str, float]:
    """One contestant's rate divided by another's on the same item: the median of all pairs, and the
    extremes of the rounds' medians.
    """
    quotients = [
        [a / b for a, b in zip(*pair, strict=True)]
        for pair in zip(rates[of], rates[over], strict=True)
    ]
    rounds = [median(pairs) for pairs in quotients]
    return {"median": middle(quotients), "least": min(rounds), "most": max(rounds)}


def decoded(decoder: Decoder, prompts: Any, tokens: int, **options: Any) -> DecodeResult:
    """Answers of exactly `tokens` tokens, greedy by default."""
    return decoder.generate(prompts, max_new_tokens=tokens, **options)


def rate(result: DecodeResult) -> float:
    """Tokens per second of decoding, without the prompt pass."""
    return result.stats.tokens_per_second


def take_turns(decodings: dict[str, Decoding]) -> dict[str, DecodeStats]:
    """Run decodings to their ends, `TURN` tokens per row of each at a time; returns their stats."""
    # A shared machine changes its speed within an answer; in turns, the change meets all alike.
    running, goal = dict(decodings), 0
    while running:
        goal += TURN
        for name, steps in list(running.items()):
            while sum(steps.stats.decoded_tokens) < goal * len(steps.stats.decoded_tokens):
                if next(steps, None) is None:
                    del running[name]
                    break
    return {name: steps.stats for name, steps in decodings.items()}


def summary(rates: Rates, accounts: Sequence[DecodeStats], name: str) -> dict[str, Any]:
    """The figures of one way of decoding, relative to "plain"."""
    speedup = ratios(rates, name, "plain")
    tau = mean(stats.tau for stats in accounts)
    return {
        "speedup": speedup,
        "tau": tau,
        "efficiency": speedup["median"] / tau,
        "nodes_per_step": mean(stats.nodes_per_step for stats in accounts),
        "tokens_per_second": middle(rates[name]),
    }


class Bench:
    """One target and the measurements of it."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], tokens: int, rounds: int):
        self.eager, self.prompts, self.tokens, self.rounds = target, prompts, tokens, rounds
        self.target = CompiledTarget(target)
        self.plain = self.decoder(None)
        self.answers = [
            decoded(self.plain, prompt, tokens + 16).sequences[0]
            for prompt in tqdm(prompts, desc="answers")
        ]

    def decoder(
        self, drafter: Drafter | None, budget: Budget | None = None, ends: bool = False
    ) -> Decoder:
        """A decoder, planned if there is no budget. Answers end only at their limit, or with `ends`
        also at the target's end tokens.
        """
        decoder = Decoder(self.target, drafter, budget, adaptive=budget is None)
        if not ends:
            decoder.end_ids = frozenset()
        return decoder

    def plain_against_generate(self) -> dict[str, Any]:
        """Compiled and eager plain decoding against `model.generate`, and the bandwidth bound."""
        eager = Decoder(self.eager)
        eager.end_ids = frozenset()
        theirs = Transformers("generate", "none", SamplingConfig(), self.eager)

        def generate(item: int) -> float:
            ends = self.eager.model.generation_config.eos_token_id
            self.eager.model.generation_config.eos_token_id = None
            answer = theirs.decode([self.prompts[item]], self.tokens, 0)
            self.eager.model.generation_config.eos_token_id = ends
            return answer.decoded_tokens / answer.decode_seconds

        contestants = {
            "generate": generate,
            "plain, eager": lambda i: rate(decoded(eager, self.prompts[i], self.tokens)),
            "plain, compiled": lambda i: rate(decoded(self.plain, self.prompts[i], self.tokens)),
        }
        rates = interleaved(contestants, self.rounds, len(self.prompts), "plain decoding")
        copied = copy_bandwidth(self.target.device)
        weights = weight_bytes(self.eager, tokens=1)
        best = max(median(values) for values in rates["plain, compiled"])
        return {
            "tokens_per_second": {name: middle(values) for name, values in rates.items()},
            "compiled_over_generate": ratios(rates, "plain, compiled", "generate"),
            "compiled_over_eager": ratios(rates, "plain, compiled", "plain, eager"),
            "weight_bytes": weights,
            "copy_bytes_per_second": copied,
            "share_of_copy_bandwidth": weights * middle(rates["plain, compiled"]) / copied,
            "share_of_copy_bandwidth_best_round": weights * best / copied,
        }

    def against_plain(
        self,
        drafters: dict[str, Drafter],
        rows: int = 1,
        tokens: int | None = None,
        ends: bool = False,
    ) -> dict[str, Any]:
        """Planned drafters against plain decoding of batches of `rows` prompts."""
        limit = tokens or self.tokens
        plain = partial(self.decoder(None, ends=ends).steps, max_new_tokens=limit)
        drafted = {
            name: partial(self.decoder(drafter, ends=ends).steps, max_new_tokens=limit)
            for name, drafter in drafters.items()
        }
        return self.compared(plain, drafted, rows)

    def rules_against_plain(self, drafter: Drafter) -> dict[str, Any]:
        """Planned trees at temperature 1 under each lossless rule, against plain decoding."""
        drawn = {"max_new_tokens": self.tokens, "temperature": 1.0}
        rules = {
            rule: partial(self.decoder(drafter).steps, verifier=rule, **drawn) for rule in RULES
        }
        return self.compared(partial(self.plain.steps, **drawn), rules)

    def compared(
        self,
        plain: Callable[..., Decoding],
        drafted: dict[str, Callable[..., Decoding]],
        rows: int = 1,
    ) -> dict[str, Any]:
        """Ways of decoding batches of `rows` prompts against a plain one."""
        groups = [
            list(self.prompts[start : start + rows])
            for start in range(0, len(self.prompts) - rows + 1, rows)
        ]
        everyone = {"plain": plain} | drafted
        accounts: dict[str, list[DecodeStats]] = {name: [] for name in everyone}
        rates: Rates = {name: [] for name in everyone}

        def decode(group: list[list[int]]) -> dict[str, DecodeStats]:
            return take_turns({name: start(group) for name, start in everyone.items()})

        decode(groups[0])  # warm-up: compiling, planning
        # The same number of answers for every batch size.
        for _ in tqdm(range(self.rounds * rows), desc=f"batch {rows}"):
            decoded_groups = [decode(group) for group in groups]
            for name in everyone:
                accounts[name] += [stats[name] for stats in decoded_groups]
                rates[name].append([stats[name].tokens_per_second for stats in decoded_groups])
        return {
            "plain_tokens_per_second": middle(rates["plain"]),
            **{name: summary(rates, accounts[name], name) for name in drafted},
        }

    def against_script(
        self, alpha: float, rows: int = 1, tokens: int | None = None
    ) -> dict[str, Any]:
        """A scripted drafter, which knows the answers of each batch, against plain decoding."""
        scripted = ScriptedByPrompt(self, alpha)
        return self.against_plain({f"scripted {alpha:g}": scripted}, rows, tokens)


class ScriptedByPrompt(Scripted):
    """A scripted drafter that looks its answers up by prompt."""

    def __init__(self, bench: Bench, alpha: float):
        super().__init__([], alpha, 7, bench.target.vocab_size)
        self.known = {
            tuple(prompt): answer
            for prompt, answer in zip(bench.prompts, bench.answers, strict=True)
        }

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> Any:
        """A session at the start of the answers to these prompts [B, T] with lengths [B]."""
        rows = zip(prompts.tolist(), lengths.tolist(), strict=True)
        self.answers = [self.known.get(tuple(prompt[:length]), []) for prompt, length in rows]
        return super().start(prompts, lengths)


def sampling_rules(bench: Bench, drafter: Drafter, nodes: int, seeds: int) -> dict[str, Any]:
    """Tokens per step of each lossless rule at temperature 1 on the same head and tree size."""
    budget = Budget(nodes, min(drafter.budgets[-1].depth, nodes - 1))
    decoder = bench.decoder(drafter, budget)
    report = {}
    for rule in RULES:
        steps: list[int] = []
        for seed in tqdm(range(seeds), desc=rule):
            for prompt in bench.prompts:
                result = decoded(
                    decoder, prompt, bench.tokens, temperature=1.0, verifier=rule, seed=seed
                )
                steps += result.stats.accept_lengths[0][:-1]  # the last step may be cut
        report[rule] = {"tokens_per_step": mean(steps), "steps": len(steps), **interval(steps)}
    return {"nodes": nodes, **report}


def interval(values: Sequence[int]) -> dict[str, float]:
    """95 % interval of the mean by the bootstrap over steps."""
    numbers = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (1000, len(values)), generator=generator)
    low, high = numbers[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return {"low": float(low), "high": float(high)}


def demo_prompts(target: Target, source: str, count: int) -> list[list[int]]:
    """The first prompts of a file as token ids."""
    prompts = []
    for conversation in read_conversations(source, limit=count):
        assert target.tokenizer is not None
        prompts.append(encode_one(conversation.messages[:1], target.tokenizer))
    return prompts


def random_prompts(target: Target, count: int) -> list[list[int]]:
    """Prompts of 64 random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (count, 64), generator=generator).tolist()


def passes(target: Target, copied: float) -> dict[str, Any]:
    """Passes alone over a few numbers of nodes, against copying at `copied` bytes per second."""
    seconds = time_passes(target, sizes=PASSES).verify
    least = {nodes: weight_bytes(target, nodes) / copied for nodes in PASSES}
    return {
        str(nodes): {
            "seconds": seconds[nodes],
            "share_of_copy_bandwidth": least[nodes] / seconds[nodes],
        }
        for nodes in PASSES
    }


def measure(bench: Bench, head: Drafter | None, report: dict[str, Any]) -> None:
    """Measure everything but the sampling rules on one target, and add it to `report`."""
    report["plain"] = bench.plain_against_generate()
    report["passes"] = passes(bench.target, report["plain"]["copy_bytes_per_second"])
    if head is not None:
        report["head"] = bench.against_plain({"head": head})
        report["head, answers to their ends"] = bench.against_plain({"head": head}, ends=True)
        report["head, temperature 1"] = bench.rules_against_plain(head)
    report["scripted"] = {f"{alpha:g}": bench.against_script(alpha) for alpha in (0.6, 0.8)}
    report["always wrong"] = bench.against_script(0.0, tokens=512)
    for rows in (4, 8):
        if head is not None:
            report[f"batch {rows}"] = bench.against_plain({"head": head}, rows)
        else:
            report[f"batch {rows}"] = bench.against_script(0.8, rows)
        print(json.dumps(report, indent=2), flush=True)


def main(
    head: Annotated[Path, typer.Option(help="Trained head of the demo target.")],
    target: Annotated[str, typer.Option(help="The demo target.")] = "assets/demo_target",
    prompts: Annotated[
        str, typer.Option(help="Prompts to report on.")
    ] = "assets/demo_prompts/test.jsonl",
    output: Annotated[Path, typer.Option(help="Folder for engine.json.")] = Path(
        "benchmarks/engine"
    ),
    rounds: Annotated[int, typer.Option(help="Rounds of every comparison.")] = 3,
    tokens: Annotated[int, typer.Option(help="New tokens of every answer.")] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    large: Annotated[str, typer.Option(help="Size of the random Llama: 91M or 8B.")] = "91M",
) -> None:
    """Measure the engine and write engine.json."""
    started = time.perf_counter()
    demo = Target.from_pretrained(target, device=device)
    bench = Bench(demo, demo_prompts(demo, prompts, 8), tokens, rounds)
    drafter = head_drafter(load_head(head, bench.target), bench.target)
    drafter.compile()
    report: dict[str, Any] = {"demo target": {}, f"random Llama, {large}": {}}
    measure(bench, drafter, report["demo target"])
    report["sampling rules"] = sampling_rules(bench, drafter, nodes=8, seeds=4)
    llama = random_llama(large, device_named(device))
    other = Bench(llama, random_prompts(llama, 8), tokens, rounds)
    measure(other, None, report[f"random Llama, {large}"])
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "dtype": "bfloat16",
        "compile_seconds": bench.target.compile_seconds + other.target.compile_seconds,
        "seconds": time.perf_counter() - started,
    }
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "engine.json", json.dumps(about | report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
