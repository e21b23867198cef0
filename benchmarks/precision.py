"""What a type of weights costs in quality: `python benchmarks/precision.py --target M --data FILE
--prompts FILE`.

Under the target as it is stored and under its other types: the loss per token of answers that
people wrote, given their questions, how often both find the same token most probable, and how many
greedy answers to other prompts stay the same. Beside them llama.cpp, against its own first file:
NODE_LLAMA in `peers.yaml`.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from peers import Peer
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
from workers.protocol import Job

ROW = 1024  # tokens; longer conversations are cut
ANSWER = 64  # tokens, of a greedy answer
# Of tokens [N]: the losses [N - 1] of all but the first, and the most probable tokens there.
Judge = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Answers = Callable[[list[list[int]]], list[list[int]]]


def ours(target: str, dtype: str) -> tuple[Judge, Answers]:
    """The losses and the greedy answers of the target under a type of weights."""
    decoder = Decoder.from_pretrained(target, dtype=dtype)

    def judge(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [N] -> [N - 1] each
        logits = decoder.target.model(ids[None]).logits[0, :-1].float()
        return cross_entropy(logits, ids[1:], reduction="none"), logits.argmax(-1)

    return judge, lambda prompts: decoder.generate(prompts, max_new_tokens=ANSWER).sequences


def llama_cpp(file: str) -> tuple[Judge, Answers]:
    """The losses and the greedy answers of a GGUF file in llama.cpp."""
    worker = Path(__file__).parent / "workers/llama_worker.mjs"
    peer = Peer(file, shlex.join(["node", str(worker), file]))
    peer.wait()

    def judge(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [N] -> [N - 1] each
        reply = peer.answer(Job([ids.tolist()], 0, 1.0, 1.0, 0))
        return -torch.tensor(reply["log_probs"]), torch.tensor(reply["best"])

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        jobs = (Job([prompt], ANSWER, 0.0, 1.0, 0) for prompt in prompts)
        return [peer.answer(job)["answers"][0] for job in jobs]

    return judge, answer


@torch.inference_mode()
def judged(judge: Judge, table: TokenTable) -> tuple[float, torch.Tensor]:
    """The loss per token of all answers, and the most probable tokens [A] there."""
    losses, best = [], []
    for sequence in tqdm(table, leave=False):
        answer = sequence.supervised[1:]
        found = judge(sequence.input_ids.long())
        losses.append(found[0][answer])
        best.append(found[1][answer])
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
    models |= {f"llama.cpp, {Path(file).name}": (llama_cpp, file) for file in gguf or []}
    found: dict[str, dict[str, float]] = {}
    firsts: dict[Any, Any] = {}
    for name, (load, *options) in models.items():
        judge, answers_to = load(*options)
        loss, best = judged(judge, table)
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
