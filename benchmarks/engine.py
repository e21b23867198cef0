"""Measures how much of tau becomes speed: `python benchmarks/engine.py`.

On the demo target and on a random Llama of 91M parameters: planned trees of drafters that
know the answer and are right with a given probability at each depth, raced against plain decoding.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from random_models import random_llama
from recorded import write_record
from scripted import Scripted
from tqdm import tqdm

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.loading import device_named
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.loading.loaded import prepared_target
from drafthead.infer.request.prompts import encode_one
from drafthead.lab.races.contestants import Ours
from drafthead.lab.races.race import PLAIN, in_batches, prepare, race
from drafthead.train.data.conversations import read_conversations

ALPHAS = (0.6, 0.8, 0.0)  # chances of a right guess at each depth; 0 is always wrong
LONG = 512  # tokens of the answers that a drafter gets which is always wrong
GREEDY = SamplingConfig()


class ScriptedByPrompt(Scripted):
    """A scripted drafter that looks its answers up by prompt."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], alpha: float, vocab_size: int):
        super().__init__([], alpha, 7, vocab_size)
        self.known = known

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> Any:
        """A session at the start of the answers to these prompts [B, T] with lengths [B]."""
        rows = zip(prompts.tolist(), lengths.tolist(), strict=True)
        self.answers = [self.known.get(tuple(prompt[:length]), []) for prompt, length in rows]
        return super().start(prompts, lengths)


def endless(target: Target, drafter: Drafter | None = None) -> Decoder:
    """A decoder, planned with a drafter, whose answers end only at their limit."""
    decoder = Decoder(target, drafter, adaptive=drafter is not None)
    decoder.end_ids = frozenset()
    return decoder


def measured(
    target: Target, prompts: Sequence[list[int]], rows: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Scripted drafters against plain decoding of batches of `rows` prompts."""
    target = prepared_target(target, None)
    plain = endless(target)
    known = {
        tuple(prompt): plain.generate([prompt], max_new_tokens=LONG + 16).sequences[0]
        for prompt in tqdm(prompts, desc="answers")
    }
    report = {}
    for alpha in ALPHAS:
        drafter = ScriptedByPrompt(known, alpha, target.vocab_size)
        ways = [
            Ours(PLAIN, "none", GREEDY, plain),
            Ours("scripted", "scripted", GREEDY, endless(target, drafter)),
        ]
        batches, most = in_batches(prompts, rows), tokens if alpha else LONG
        for way in ways:
            prepare(way, batches[0], most, seed=0)
        alone, scripted = race(ways, batches, rounds, most, seed=0)
        speedups = [a / b for a, b in zip(scripted.rates(), alone.rates(), strict=True)]
        stats = scripted.stats()
        assert stats is not None
        report[f"{alpha:g}"] = {
            "speedup": {"median": median(speedups), "least": min(speedups), "most": max(speedups)},
            "tau": stats.tau,
            "nodes_per_step": stats.nodes_per_step,
            "plain_tokens_per_second": median(alone.rates()),
        }
    return report


def demo_prompts(target: Target, source: str, count: int) -> list[list[int]]:
    """The first prompts of a file as token ids."""
    assert target.tokenizer is not None
    conversations = read_conversations(source, limit=count)
    return [encode_one(each.messages[:1], target.tokenizer) for each in conversations]


def random_prompts(target: Target, count: int) -> list[list[int]]:
    """Prompts of 64 random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (count, 64), generator=generator).tolist()


def main(
    target: Annotated[str, typer.Option(help="The demo target.")] = "assets/demo_target",
    prompts: Annotated[
        str, typer.Option(help="Prompts to report on.")
    ] = "assets/demo_prompts/test.jsonl",
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path(
        "benchmarks/engine/engine.json"
    ),
    batch_size: Annotated[int, typer.Option(help="Prompts that are decoded together.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds of every comparison.")] = 3,
    tokens: Annotated[int, typer.Option(help="New tokens of every answer.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    large: Annotated[str, typer.Option(help="Size of the random Llama: 91M or 8B.")] = "91M",
) -> None:
    """Race scripted drafters, and write what they gained."""
    demo = load_decoder_only(target, device=device)
    llama = random_llama(large, device_named(device))
    how = batch_size, tokens, rounds
    report = {
        "dtype": "bfloat16",
        "demo target": measured(demo, demo_prompts(demo, prompts, 8), *how),
        f"random Llama, {large}": measured(llama, random_prompts(llama, 8), *how),
    }
    write_record(output, report)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
