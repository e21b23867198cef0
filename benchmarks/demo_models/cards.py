"""Model cards of the demo models, written from the record of their training."""

from pathlib import Path
from typing import Any

from demo_models.training import Recipe
from drafthead.core.storage.files import write_text

HEADER = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, speculative-decoding, demo]
---
"""
PURPOSE = {
    "target": "The target of drafthead's demo: large enough that drafting pays on a CPU, small "
    "enough to be trained there.",
    "draft": "The separate draft model of drafthead's demo, the classic drafter that heads are "
    "compared with. It shares the target's tokenizer.",
}
DATA = """## Data
Functions with a docstring from the Python standard library and from the packages listed below:
the user's message is signature and docstring, the assistant's answer the function without the
docstring. Files are split by a hash of their name: 92 % train, 4 % validation, 4 % test. Held-out
functions that share more than half of their lines with training files are left out. The sources
are under the PSF, BSD, MIT, Apache-2.0, HPND and similar permissive licences; the weights are under
Apache-2.0.
"""
USE = """## Use
It writes Python-like text and knows nothing. It exists so that draft heads can be trained and
measured offline, with the proportions of a larger model.
"""


def recipe_line(recipe: Recipe) -> str:
    """A recipe as a sentence."""
    optimizer = recipe.optimizer
    return (
        f"{recipe.epochs:g} epochs in batches of {recipe.batch_tokens} tokens, Muon "
        f"{optimizer.muon_lr:g} for matrices and AdamW {optimizer.lr:g} for the rest, "
        f"{optimizer.schedule} decay, bfloat16 autocast, seed {recipe.seed}"
    )


def polishing_lines(rounds: list[dict[str, float]]) -> list[str]:
    """What the model learnt from its own answers, one table row per round."""
    if not rounds:
        return []
    lines = [
        "Then it answered training questions itself, half greedily and half at temperature 0.8. "
        "Answers that ended without repeating an 8-gram were learnt, tokens that completed a "
        "repeated 8-gram unlearnt (unlikelihood training, arXiv 1908.04319):",
        "",
        "| round | answers | ended | learnt | with repetitions |",
        "|---|---|---|---|---|",
    ]
    for number, share in enumerate(rounds, start=1):
        shares = " | ".join(f"{share[key]:.0%}" for key in ("ended", "learnt", "with_repetitions"))
        lines.append(f"| {number} | {share['answers']:.0f} | {shares} |")
    return lines


def write_card(
    folder: Path, name: str, record: dict[str, Any], pretraining: Recipe, polishing: Recipe | None
) -> None:
    """Write README.md into the model's folder."""
    loss = record["validation_nats_per_token"]
    pairs = record["pairs"]
    greedy = record["greedy_validation"]
    training = [
        f"Trained from scratch on {record['tokens_trained']:,} tokens: {recipe_line(pretraining)}.",
        *polishing_lines(record["polishing_rounds"]),
    ]
    if polishing is not None:
        training.append(f"\nEach round: {recipe_line(polishing)}.")
    results = [
        f"- loss on validation files: {loss['conversations']:.3f} nats a token on whole "
        f"conversations, {loss['answers']:.3f} on answers alone",
        f"- greedy answers to {greedy['prompts']} validation prompts, at most "
        f"{greedy['max_new_tokens']} tokens: {greedy['ended']:.0%} end by themselves, "
        f"{greedy['repeated_8gram_share']:.1%} of their 8-grams repeat",
    ]
    sources = ", ".join(f"{name} {version}" for name, version in record["sources"].items())
    sections = [
        HEADER + f"# demo_{name}\n",
        f"{PURPOSE[name]} A Llama of {record['parameters'] / 1e6:.1f} million parameters.\n",
        DATA,
        f"{pairs['train']:,} pairs for training, {pairs['validation']} for validation, "
        f"{pairs['test']} for test. Packages: {sources}.\n",
        "## Training\n" + "\n".join(training) + "\n",
        "Command: `python -m demo_models.build_models`; all figures are in "
        "`training_record.json`.\n",
        "## Results\n" + "\n".join(results) + "\n",
        USE,
    ]
    write_text(folder / "README.md", "\n".join(sections))
