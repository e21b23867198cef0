"""Makes the small model of tests and offline demo out of the demo target.

    drafthead data distill --target TARGET --prompts PROMPTS --output answers.jsonl
    drafthead train --init draft_model --target TARGET --config small.yaml
    drafthead train --config small.yaml head.num_layers=4 train.output=SMALL
    PYTHONPATH=benchmarks python -m demo_models.shrink SMALL --output assets/demo_target

`drafthead train` cuts four of the target's layers out and teaches them its answers, as a draft
model. Small models loop more than large ones, so a round of learning from its own answers follows,
as in `build_models`. A killed run continues.
"""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM

from demo_models.rollouts import ASKED, Polishing, greedy_behaviour, polish
from demo_models.training import Recipe
from drafthead.core.storage.files import write_text
from drafthead.train.settings import OptimizerConfig

OPTIMIZER = OptimizerConfig(
    name="muon", lr=3e-4, muon_lr=0.003, schedule="linear", warmup_ratio=0.1
)
POLISHING = Polishing(Recipe(epochs=1.0, optimizer=OPTIMIZER))
TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def questions_of(path: Path) -> list[str]:
    """The users' texts of a file of prompts."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row["messages"][0]["content"] for row in rows]


def main(
    small: Annotated[Path, typer.Argument(help="Folder of the draft model.")],
    prompts: Annotated[Path, typer.Option(help="Folder of prompts.")] = Path("assets/demo_prompts"),
    work: Annotated[Path, typer.Option(help="Checkpoints.")] = Path("runs/demo-models"),
    output: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("assets/demo_target"),
) -> None:
    """Polish a draft model and write it as a model of its own, with a record of its training."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(small)
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32)
    asked = questions_of(prompts / "train.jsonl")
    rounds = polish("small", model, tokenizer, asked, POLISHING, work, save_every=20)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    model.save_pretrained(output)
    for name in TOKENIZER:
        shutil.copy(small / name, output / name)
    evaluations = (small / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cut": json.loads(evaluations[-1]),
        "polishing": asdict(POLISHING),
        "polishing_rounds": rounds,
        "greedy_validation": greedy_behaviour(
            model, tokenizer, questions_of(prompts / "validation.jsonl")[:ASKED]
        ),
    }
    write_text(output / "training_record.json", json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
