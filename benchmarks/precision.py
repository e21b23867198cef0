"""What a type of weights costs in quality: `python benchmarks/precision.py --target M --data FILE`.

The perplexity of answers that people wrote, given their questions, under the target as it is stored
and under its other types; and how often both find the same token most probable.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.target import Target
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.sequences import TokenTable
from drafthead.train.data.token_table import token_table

ROW = 1024  # tokens; longer conversations are cut


@torch.inference_mode()
def judged(target: Target, table: TokenTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [A] of all answers' tokens, and the most probable tokens [A] there."""
    log_probs, best = [], []
    for sequence in tqdm(table, desc=target.precision, leave=False):
        ids = sequence.input_ids.long()
        answer = sequence.supervised[1:]
        logits = target.model(ids[None]).logits[0, :-1][answer].float()
        known = ids[1:][answer, None]
        log_probs.append(logits.log_softmax(-1).gather(1, known).squeeze(1))
        best.append(logits.argmax(-1))
    return torch.cat(log_probs), torch.cat(best)


def main(
    target: Annotated[str, typer.Option(help="Model: folder, GGUF file or hub id.")],
    data: Annotated[str, typer.Option(help="Conversations with answers that people wrote.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    prompt_column: Annotated[str | None, typer.Option(help="Column of the questions.")] = None,
    limit: Annotated[int, typer.Option(help="Use this many conversations.")] = 200,
    types: Annotated[str, typer.Option(help="To compare, the first with all.")] = "bfloat16,int8",
) -> None:
    """Compare types of weights by the perplexity of given answers."""
    found, rows = {}, []
    first = None
    for name in types.split(","):
        model = load_decoder_only(target, name)
        assert model.tokenizer is not None
        table = token_table(Reading(data, prompt_column, ROW, limit), model.tokenizer)
        log_probs, best = judged(model, table)
        first = best if first is None else first
        perplexity = math.exp(-log_probs.mean().item())
        same = (best == first).float().mean().item()
        found[name] = {"tokens": len(best), "perplexity": perplexity, "same_best_token": same}
        rows.append([name, str(len(best)), number(perplexity, 3), f"{100 * same:.1f} %"])
    print_table(
        Table("answers under each type", ["type", "tokens", "perplexity", "same token"], rows)
    )
    write_record(output, {"types": found})


if __name__ == "__main__":
    typer.run(main)
