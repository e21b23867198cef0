"""What a type of weights costs in quality: `python benchmarks/precision.py --target M --data FILE
--prompts FILE`.

Under the target as it is stored and under its other types: the loss per token of answers that
people wrote, given their questions, how often both find the same token most probable, and how many
greedy answers to other prompts stay the same. Beside them llama.cpp, against its own first file.
"""

from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from recorded import write_record
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from drafthead.infer import Decoder
from drafthead.lab.races.divergence import first_difference
from drafthead.lab.races.record import prompt_ids
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.sequences import TokenTable
from drafthead.train.data.token_table import token_table
from workers.protocol import until_end

ROW = 1024  # tokens; longer conversations are cut
ANSWER = 64  # tokens, of a greedy answer
Logits = Callable[[torch.Tensor], torch.Tensor]  # [N] -> [N, V]
Answers = Callable[[list[list[int]]], list[list[int]]]


def ours(target: str, dtype: str) -> tuple[Logits, Answers]:
    """The logits and the greedy answers of the target under a type of weights."""
    decoder = Decoder.from_pretrained(target, dtype=dtype)
    return (
        lambda ids: decoder.target.model(ids[None]).logits[0],
        lambda prompts: decoder.generate(prompts, max_new_tokens=ANSWER).sequences,
    )


def llama_cpp(file: str, ends: Collection[int]) -> tuple[Logits, Answers]:
    """The logits and the greedy answers of a GGUF file in llama.cpp (llama-cpp-python)."""
    from llama_cpp import Llama

    model = Llama(file, n_ctx=2 * ROW, logits_all=True, verbose=False)

    def logits(ids: torch.Tensor) -> torch.Tensor:  # [N] -> [N, V]
        model.reset()
        model.eval(ids.tolist())
        return torch.from_numpy(model.scores[: len(ids)])

    def answer(prompt: list[int]) -> list[int]:
        model.reset()
        return until_end(list(islice(model.generate(prompt, temp=0), ANSWER)), ends)

    return logits, lambda prompts: list(map(answer, prompts))


@torch.inference_mode()
def judged(logits_of: Logits, table: TokenTable) -> tuple[float, torch.Tensor]:
    """The loss per token of all answers, and the most probable tokens [A] there."""
    losses, best = [], []
    for sequence in tqdm(table, leave=False):
        ids = sequence.input_ids.long()
        answer = sequence.supervised[1:]
        logits = logits_of(ids)[:-1][answer].float()
        losses.append(cross_entropy(logits, ids[1:][answer], reduction="none"))
        best.append(logits.argmax(-1))
    return torch.cat(losses).mean().item(), torch.cat(best)


def main(
    target: Annotated[str, typer.Option(help="Model: folder, GGUF file or hub id.")],
    data: Annotated[str, typer.Option(help="Conversations with answers that people wrote.")],
    prompts: Annotated[str, typer.Option(help="JSONL of prompts to answer.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    prompt_column: Annotated[str | None, typer.Option(help="Column of the questions.")] = None,
    limit: Annotated[int, typer.Option(help="Use this many conversations.")] = 200,
    answers: Annotated[int, typer.Option(help="Answer this many prompts.")] = 60,
    types: Annotated[str, typer.Option(help="To compare, the first with all.")] = "bfloat16,int8",
    gguf: Annotated[list[str] | None, typer.Option(help="For llama.cpp, as `types`.")] = None,
) -> None:
    """Compare types of weights by the loss of given answers and by their own."""
    stored = Decoder.from_pretrained(target)
    assert stored.target.tokenizer is not None
    table = token_table(Reading(data, prompt_column, ROW, limit), stored.target.tokenizer)
    ids = prompt_ids(prompts, answers, stored, ANSWER)
    models = {name: (ours, target, name) for name in types.split(",")}
    models |= {Path(file).name: (llama_cpp, file, stored.end_ids) for file in gguf or []}
    found: dict[str, dict[str, float]] = {}
    firsts: dict[Any, Any] = {}
    for name, (load, *options) in models.items():
        logits_of, answers_to = load(*options)
        loss, best = judged(logits_of, table)
        replies = answers_to(ids)
        first, plain = firsts.setdefault(load, (best, replies))
        places = [first_difference(a, b) for a, b in zip(plain, replies, strict=True) if a != b]
        found[name] = {
            "tokens": len(best), "loss": loss,
            "same_best_token": (best == first).float().mean().item(),
            "answers": len(ids), "same_answers": 1 - len(places) / len(ids),
            "mean_first_difference": mean(places) if places else ANSWER,
        }  # fmt: skip
    rows = [[name, *(number(value, 4) for value in each.values())] for name, each in found.items()]
    print_table(Table("types of weights", ["type", *next(iter(found.values()))], rows))
    write_record(output, {"types": found})


if __name__ == "__main__":
    typer.run(main)
