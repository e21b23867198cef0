"""Measures distillation: `python benchmarks/distillation.py --target MODEL --prompts FILE`.

The answers to the same prompts by `Decoder.serve` and by transformers' `generate` in
batches of as many rows, in alternating rounds. Both take the prompts sorted by length and answer
greedily; tokens count up to each answer's end.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recorded import write_record
from tqdm import tqdm
from transformers import PreTrainedModel

from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.request.prompts import encode_one
from drafthead.train.data.conversations import read_conversations


def served(decoder: Decoder, prompts: list[list[int]], tokens: int, rows: int) -> int:
    """Decode all prompts; returns the number of new tokens."""
    answers = decoder.serve(prompts, max_rows=rows, max_new_tokens=tokens)
    return sum(len(answer.tokens) for answer in answers)


def generated(model: PreTrainedModel, prompts: list[list[int]], tokens: int, rows: int) -> int:
    """Decode all prompts by `model.generate`; returns the number of new tokens."""
    config = model.generation_config
    ends = torch.tensor(config.eos_token_id).view(-1)
    total = 0
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        longest = max(map(len, batch))
        padding = [longest - len(prompt) for prompt in batch]
        output = model.generate(  # type: ignore[operator]
            torch.tensor([[0] * n + p for n, p in zip(padding, batch, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )[:, longest:]
        for row in output:
            found = torch.isin(row, ends).nonzero()
            total += int(found[0]) + 1 if len(found) else len(row)
    return total


def main(
    target: Annotated[str, typer.Option(help="Model to decode with.")],
    prompts: Annotated[str, typer.Option(help="JSONL of prompts.")],
    dtype: str = "bfloat16",
    limit: Annotated[int, typer.Option(help="Prompts.")] = 128,
    tokens: Annotated[int, typer.Option(help="Most new tokens of each.")] = 192,
    rows: Annotated[int, typer.Option(help="Prompts at a time.")] = 64,
    rounds: int = 3,
    output: Path = Path("benchmarks/distillation.json"),
) -> None:
    """Time both ways in alternating rounds, after one that is not counted."""
    loaded = load_decoder_only(target, dtype)
    conversations = read_conversations(prompts, limit=limit)
    ids = [encode_one(each.messages[:1], loaded.tokenizer) for each in conversations]
    ids.sort(key=len, reverse=True)
    decoder = decoder_for(loaded, None, None, compile=None)
    ways = {
        "serve": lambda: served(decoder, ids, tokens, rows),
        "generate": lambda: generated(loaded.model, ids, tokens, rows),
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in tqdm(range(rounds + 1)):
        for way, run in ways.items():
            begin = time.perf_counter()
            count = run()
            seconds = time.perf_counter() - begin
            if number:
                found[way].append({"tokens": count, "seconds": round(seconds, 2)})
    speeds = {
        way: statistics.median(each["tokens"] / each["seconds"] for each in runs)
        for way, runs in found.items()
    }
    about = {
        "prompts": len(ids), "max_new_tokens": tokens, "rows": rows, "dtype": dtype,
        "rounds": found,
        "tokens_per_second": {way: round(speed, 1) for way, speed in speeds.items()},
        "ratio": round(speeds["serve"] / speeds["generate"], 2),
    }  # fmt: skip
    write_record(output, about)
    print(json.dumps(about["tokens_per_second"] | {"ratio": about["ratio"]}))


if __name__ == "__main__":
    typer.run(main)
