"""The target's own answers as lessons: good ones are learnt, repetitions in the others unlearnt.

A small model decoded greedily falls into loops, and loops are easy for drafters that copy earlier
text. After pretraining the target answers training questions, greedily and at a temperature.
Answers that end and do not repeat themselves are learnt (rejection-sampling fine-tuning); tokens
that complete a repeated 8-gram are unlearnt (Welleck et al., 2020, arXiv 1908.04319).
"""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from demo_models.training import IGNORE, LEARN, UNLEARN, Example, Recipe, TrainingRun
from drafthead.core.storage.files import write_text
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.answers.results import repeated_ngram_share, repeats
from drafthead.infer.request.prompts import encode_one

MAX_ANSWER_TOKENS = 160
BATCH = 64
ASKED, MAX_NEW_TOKENS = 64, 128  # held-out questions, and tokens of their answers


@dataclass(frozen=True)
class Polishing:
    """Rounds of learning from own answers, each to so many questions."""

    recipe: Recipe  # of each round
    rounds: int = 1
    questions: int = 1536


@dataclass(frozen=True)
class Rollout:
    """One answer of the model to a prompt."""

    prompt: list[int]
    answer: list[int]
    finished: bool


def lesson(rollout: Rollout) -> Example | None:
    """What to learn from an answer; None when there is nothing."""
    repeated = repeats(rollout.answer)
    if rollout.finished and not any(repeated):
        signs = [LEARN] * len(rollout.answer)
    elif any(repeated):
        signs = [UNLEARN if again else IGNORE for again in repeated]
    else:
        return None
    return Example(rollout.prompt + rollout.answer, [IGNORE] * len(rollout.prompt) + signs)


def roll_out(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    path: Path,
) -> list[Rollout]:
    """Answers to the questions, the first half greedily, the others at temperature 0.8.

    They are stored in `path`; a second call reads them from there.
    """
    if not path.exists():
        served = copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[arg-type]
        decoder = Decoder(Target(served, tokenizer))
        rollouts: list[tuple[str, list[int], bool]] = []
        for start in tqdm(range(0, len(questions), BATCH), desc=path.stem):
            batch = questions[start : start + BATCH]
            temperature = 0.0 if start < len(questions) // 2 else 0.8
            result = decoder.generate(
                batch, max_new_tokens=MAX_ANSWER_TOKENS, temperature=temperature, seed=start
            )
            rollouts += zip(batch, result.sequences, result.finished, strict=True)
        write_text(path, json.dumps(rollouts))
    return [
        Rollout(encode_one(question, tokenizer), answer, finished)
        for question, answer, finished in json.loads(path.read_text())
    ]


def polish(
    name: str,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    polishing: Polishing | None,
    work: Path,
    save_every: int,
) -> list[dict[str, float]]:
    """Rounds of answering and learning from the answers; returns the figures of each round."""
    figures = []
    for number in range(polishing.rounds if polishing is not None else 0):
        assert polishing is not None
        chosen = random.Random(number).sample(questions, polishing.questions)
        rollouts = roll_out(model, tokenizer, chosen, work / f"{name}_answers_{number}.json")
        lessons = [example for rollout in rollouts if (example := lesson(rollout)) is not None]
        good = sum(LEARN in example.signs for example in lessons)
        figures.append({
            "answers": len(rollouts),
            "ended": sum(rollout.finished for rollout in rollouts) / len(rollouts),
            "learnt": good / len(rollouts),
            "with_repetitions": (len(lessons) - good) / len(rollouts),
        })  # fmt: skip
        run = TrainingRun(f"{name}_polish_{number}", model, lessons, polishing.recipe, work)
        run.train(save_every)
    return figures


def greedy_behaviour(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: list[str]
) -> dict[str, float]:
    """How many greedy answers end by themselves, and which share of their 8-grams repeats.

    The model is frozen by it.
    """
    result = Decoder(Target(model, tokenizer)).generate(questions, max_new_tokens=MAX_NEW_TOKENS)
    return {
        "prompts": len(questions),
        "max_new_tokens": MAX_NEW_TOKENS,
        "ended": sum(result.finished) / len(questions),
        "repeated_8gram_share": repeated_ngram_share(result.sequences),
    }
