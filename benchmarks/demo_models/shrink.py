"""Makes the small model of tests and offline demo out of the demo target.

    drafthead data distill --target TARGET --prompts PROMPTS --output answers.jsonl
    drafthead train --init draft_model --target TARGET --config small.yaml
    drafthead train --config small.yaml head.num_layers=4 train.output=SMALL
    PYTHONPATH=benchmarks python -m demo_models.shrink SMALL --output assets/demo_target

`drafthead train` cuts four of the target's layers out and teaches them its answers, as a draft
model. Small models loop more than large ones, so a round of learning from its own answers follows,
as in `build_models`. A killed run continues.
"""

import copy
import json
import logging
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from demo_models.rollouts import lesson, roll_out
from demo_models.training import LEARN, Recipe, TrainingRun
from drafthead.heads.storage.files import write_text
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.engine.results import repeated_ngram_share
from drafthead.train.optimizers import OptimizerConfig

POLISHING = Recipe(
    epochs=1.0,
    optimizer=OptimizerConfig(
        name="muon", lr=3e-4, muon_lr=0.003, schedule="linear", warmup_ratio=0.1
    ),
)
TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
HELD_OUT, MAX_NEW_TOKENS = 64, 128


def questions_of(path: Path) -> list[str]:
    """The users' texts of a file of prompts."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row["messages"][0]["content"] for row in rows]


def behaviour(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: list[str]
) -> dict[str, float]:
    """How many greedy answers end by themselves, and which share of their 8-grams repeats."""
    frozen = copy.deepcopy(model)  # a Target's weights cannot be trained any more
    result = Decoder(Target(frozen, tokenizer)).generate(questions, max_new_tokens=MAX_NEW_TOKENS)
    return {
        "prompts": len(questions),
        "max_new_tokens": MAX_NEW_TOKENS,
        "ended": sum(result.finished) / len(questions),
        "repeated_8gram_share": repeated_ngram_share(result.sequences),
    }


def main(
    small: Annotated[Path, typer.Argument(help="Folder of the draft model.")],
    prompts: Annotated[Path, typer.Option(help="Folder of prompts.")] = Path("assets/demo_prompts"),
    rounds: Annotated[int, typer.Option(help="Rounds of learning from own answers.")] = 1,
    answers: Annotated[int, typer.Option(help="Answers in a round.")] = 1536,
    work: Annotated[Path, typer.Option(help="Checkpoints.")] = Path("runs/demo-models"),
    output: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("assets/demo_target"),
) -> None:
    """Polish a draft model and write it as a model of its own, with a record of its training."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(small)
    model = LlamaForCausalLM.from_pretrained(small, dtype=torch.float32)
    asked = questions_of(prompts / "train.jsonl")
    held_out = questions_of(prompts / "validation.jsonl")[:HELD_OUT]
    figures = []
    for number in range(rounds):
        chosen = random.Random(number).sample(asked, answers)
        rollouts = roll_out(model, tokenizer, chosen, work / f"small_answers_{number}.json")
        lessons = [example for rollout in rollouts if (example := lesson(rollout)) is not None]
        learnt = sum(LEARN in example.signs for example in lessons)
        TrainingRun(f"small_polish_{number}", model, lessons, POLISHING, work).train(save_every=20)
        figures.append({
            "answers": len(rollouts),
            "ended": sum(rollout.finished for rollout in rollouts) / len(rollouts),
            "learnt": learnt / len(rollouts),
            "with_repetitions": (len(lessons) - learnt) / len(rollouts),
        } | behaviour(model, tokenizer, held_out))  # fmt: skip
        logging.info("round %d: %s", number, figures[-1])
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps nn.Module.to
    model.save_pretrained(output)
    for name in TOKENIZER:
        shutil.copy(small / name, output / name)
    evaluations = (small / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "cut": json.loads(evaluations[-1]),
        "polishing": asdict(POLISHING),
        "polishing_rounds": figures,
        "greedy_validation": behaviour(model, tokenizer, held_out),
    }
    write_text(output / "training_record.json", json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
