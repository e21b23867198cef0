"""Measures the sampling rules: `python benchmarks/rules.py --head runs/demo/medusa`.

Tokens per step of every lossless rule above temperature 0, with a draft model's chain and a head's
tree, on held-out prompts. What `auto` takes for each kind of drafter follows from it.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer.decoder import Decoder
from drafthead.infer.request.prompts import encode_one
from drafthead.infer.verifiers import VERIFIERS
from drafthead.train.data.conversations import read_conversations

RULES = sorted(name for name, rule in VERIFIERS.items() if rule.lossless and not rule.greedy)
CHAIN, TREE = 4, 8  # drafted tokens of the draft model, nodes of the head's tree
ROWS, RESAMPLES = 16, 2000

Counts = torch.Tensor  # [M, 2] tokens and steps of each prompt


def counts_of(decoder: Decoder, prompts: list[list[int]], rule: str, **options: Any) -> Counts:
    """What decoding with a rule commits, the same seeds for every rule."""
    found = []
    for start in range(0, len(prompts), ROWS):
        rows = prompts[start : start + ROWS]
        result = decoder.generate(rows, verifier=rule, seed=1000 + start, **options)
        found += [[sum(lengths), len(lengths)] for lengths in result.stats.accept_lengths]
    return torch.tensor(found, dtype=torch.float64)


def interval(values: torch.Tensor) -> list[float]:
    """The middle 95 % of resampled values [R]."""
    return [round(x, 3) for x in values.quantile(torch.tensor([0.025, 0.975]).double()).tolist()]


def resampled(counts: Counts) -> torch.Tensor:
    """Tokens per step [R] of prompts drawn with replacement, the same ones for every rule."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    tokens, steps = counts[chosen].sum(1).unbind(-1)
    return tokens / steps


def compared(decoder: Decoder, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
    """Tokens per step of each rule, and the default's share of the best with its interval."""
    assert decoder.drafter is not None
    counts = {rule: counts_of(decoder, prompts, rule, **options) for rule in RULES}
    mean = {rule: (c[:, 0].sum() / c[:, 1].sum()).item() for rule, c in counts.items()}
    default, best = decoder.drafter.sampling_rule, max(mean, key=mean.__getitem__)
    share = resampled(counts[default]) / resampled(counts[best])
    return {
        "tokens_per_step": {
            rule: {"mean": round(mean[rule], 3), "interval": interval(resampled(counts[rule]))}
            for rule in RULES
        },
        "default": default,
        "best": best,
        "share_of_best": {
            "mean": round(mean[default] / mean[best], 3),
            "interval": interval(share),
        },
    }


def main(
    head: Annotated[Path | None, typer.Option(help="A head for the target.")] = None,
    target: str = "assets/demo_target",
    draft_model: str = "assets/demo_draft",
    prompts: Path = Path("assets/demo_prompts/test.jsonl"),
    limit: Annotated[int, typer.Option(help="Prompts.")] = 64,
    tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 48,
    output: Path = Path("benchmarks/rules/rules.json"),
) -> None:
    """Decode the prompts with every rule and drafter at temperatures 1 and 0.7."""
    loaded = load_decoder_only(target, "float32", "auto", False)
    conversations = read_conversations(str(prompts), limit=limit)
    ids = [encode_one(each.messages[:1], loaded.tokenizer) for each in conversations]
    drafters: dict[str, dict[str, Any]] = {
        "draft model": {
            "draft": f"model:{draft_model}",
            "draft_tokens": CHAIN,
            "tree_nodes": CHAIN + 1,
        }
    }
    if head is not None:
        drafters["head"] = {"draft": head, "tree_nodes": TREE}
    results = {}
    for name, options in tqdm(drafters.items()):
        decoder = Decoder.from_pretrained(target, dtype="float32", **options)
        results[name] = {
            f"temperature {t}": compared(decoder, ids, temperature=t, max_new_tokens=tokens)
            for t in (1.0, 0.7)
        }
    about = {"prompts": len(ids), "max_new_tokens": tokens, "chain": CHAIN, "tree_nodes": TREE}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_record(output, {**about, "results": results})


if __name__ == "__main__":
    typer.run(main)
