"""How often the token after a match is right in given answers: `benchmarks/matches.py --help`.

The texts are read again as lookup in a row's own past reads them: each token that the target wrote
is compared with what followed the longest match before it. What drafthead believes at first of
matches of each length (`infer/drafters/lookup.py`) comes from here.
"""

from pathlib import Path
from typing import Annotated

import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.core.target.any_target import tokenizer_named
from drafthead.infer.drafters.history import LONGEST, History
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.sequences import TokenTable
from drafthead.train.data.token_table import token_table

ROW = 1 << 20  # tokens of a conversation: nothing is cut


def counted(table: TokenTable) -> tuple[list[int], list[int]]:
    """Tokens that the target wrote after matches of 1, 2, ... `LONGEST` tokens, and right ones."""
    seen, right = [0] * LONGEST, [0] * LONGEST
    for sequence in tqdm(table, desc="texts", leave=False):
        first, *others = sequence.input_ids.tolist()
        past = History(first)
        for token, written in zip(others, sequence.supervised[1:].tolist(), strict=True):
            if written and past.match is not None:
                seen[past.match.length - 1] += 1
                right[past.match.length - 1] += past.guess == token
            past.append(token)
    return seen, right


def main(
    tokenizer: Annotated[str, typer.Option(help="The target that wrote the answers.")],
    data: Annotated[str, typer.Option(help="Conversations with the target's answers.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    limit: Annotated[int, typer.Option(help="Use this many conversations.")] = 2000,
) -> None:
    """Count how often what followed a match was right, by the length of the match."""
    table = token_table(Reading(data, None, ROW, limit), tokenizer_named(tokenizer))
    seen, right = counted(table)
    shares = [a / b if b else None for a, b in zip(right, seen, strict=True)]
    rows = [
        [str(length), str(count), number(share)]
        for length, (count, share) in enumerate(zip(seen, shares, strict=True), start=1)
    ]
    print_table(Table("tokens after matches", ["length", "tokens", "right"], rows))
    write_record(output, {"seen": seen, "right": right})


if __name__ == "__main__":
    typer.run(main)
