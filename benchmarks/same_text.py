"""Is drafted text that of plain decoding? `python benchmarks/same_text.py --target M --way W ...`.

Each question is answered by plain decoding of one row, greedily and by seeded draws; then by each
way of drafting, alone and in batches. In bfloat16 on a CPU with our kernels all must be equal; with
DRAFTHEAD_KERNELS=avx2 they are those for AVX2. The file is written after each batch; the same
command goes on from there.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from recorded import about_run
from tqdm import tqdm, trange

from drafthead.backends.cpu.kernels.kernel_set import kernel_set
from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_json
from drafthead.core.target.any_target import load_decoder_only
from drafthead.infer.answers.results import DecodeResult
from drafthead.infer.decoder import Decoder
from drafthead.lab.races.record import prompt_ids
from drafthead.lab.reports.report import Table, print_table

COUNTED = ("answers", "different", "tokens", "passes")  # passes: steps that a row took part in

Counts = Counter[tuple[str, float, int, str]]  # way, temperature, rows; one of COUNTED


def answers(
    decoder: Decoder, prompts: list[list[int]], first: int, temperature: float, tokens: int
) -> DecodeResult:
    """Answers to prompts in one batch, drawn with the seeds `first`, `first` + 1, ..."""
    seeds = list(range(first, first + len(prompts)))
    rule = "match" if temperature else "auto"
    return decoder.generate(
        prompts, max_new_tokens=tokens, temperature=temperature, seed=seeds, verifier=rule
    )


def compare(
    plain: Decoder,
    ways: dict[str, Decoder],
    prompts: list[list[int]],
    first: int,  # number of the first of these prompts
    temperatures: tuple[float, ...],
    tokens: int,
    counts: Counts,
    alone: int,  # so many of the prompts are answered alone as well
) -> None:
    """Count, for each way, how many answers to these prompts are not plain decoding's."""
    parts = [(0, prompts), *((row, [prompt]) for row, prompt in enumerate(prompts[:alone]))]
    for temperature in temperatures:
        expected = [
            answers(plain, [prompt], first + row, temperature, tokens).sequences[0]
            for row, prompt in enumerate(prompts)
        ]
        for name, decoder in ways.items():
            for start, some in parts:
                made = answers(decoder, some, first + start, temperature, tokens)
                pairs = zip(made.sequences, expected[start:], strict=False)
                differ = [start + row for row, (own, right) in enumerate(pairs) if own != right]
                for row in differ:
                    tqdm.write(f"{name}, {temperature=}, {len(some)} rows: {first + row} differs")
                found = {
                    "answers": len(some),
                    "different": len(differ),
                    "tokens": sum(map(len, made.sequences)),
                    "passes": sum(map(len, made.stats.accept_lengths)),
                }
                for what, number in found.items():
                    counts[name, temperature, len(some), what] += number


def results_of(counts: Counts) -> list[dict[str, object]]:
    """The counts as rows: of each way, temperature and number of rows."""
    kinds = dict.fromkeys(key[:3] for key in counts)
    return [
        {"way": way, "temperature": temperature, "rows": rows}
        | {what: counts[way, temperature, rows, what] for what in COUNTED}
        for way, temperature, rows in kinds
    ]


def counted_before(output: Path, about: dict[str, object]) -> tuple[int, Counts]:
    """Questions that a stopped run of the same command answered, and its counts.

    Raises UserError if the file is of another run.
    """
    counts: Counts = Counter()
    if not output.exists():
        return 0, counts
    before = json.loads(output.read_text())
    if {name: before.get(name) for name in about} != about:
        raise UserError(f"{output} is of another run: remove it, or name another --output")
    for row in before["results"]:
        for what in COUNTED:
            counts[row["way"], row["temperature"], row["rows"], what] = row[what]
    return before["questions"], counts


def main(
    target: Annotated[str, typer.Option(help="Model: folder, GGUF file or hub id.")],
    way: Annotated[list[str], typer.Option(help="What drafts, joined by +: HEAD+lookup.")],
    prompts: Annotated[str, typer.Option(help="Questions, as `compare` reads them.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    limit: Annotated[int, typer.Option(help="Use this many questions.")] = 100,
    rows: Annotated[int, typer.Option(help="Questions of a batch.")] = 5,
    alone: Annotated[int, typer.Option(help="Of each batch, so many are answered alone.")] = 1,
    tokens: Annotated[int, typer.Option(help="Most new tokens of an answer.")] = 128,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of each tree, the root included.")] = 8,
    temperature: Annotated[float, typer.Option(help="Of draws, beside greedy answers.")] = 0.8,
) -> None:
    """Compare drafted answers with those of plain decoding, token by token."""
    made = load_decoder_only(target, "bfloat16", "cpu").packed()
    plain = Decoder.from_pretrained(made)
    ways = {
        name: Decoder.from_pretrained(made, name.split("+"), tree_nodes=tree_nodes) for name in way
    }
    questions = prompt_ids(prompts, limit, plain, tokens)
    about: dict[str, object] = {
        **about_run(),
        "kernels": kernel_set(),
        "same_bits": made.same_bits,
    }
    done, counts = counted_before(output, about)
    for first in trange(done, len(questions), rows, desc="batches"):
        batch = questions[first : first + rows]
        compare(plain, ways, batch, first, (0.0, temperature), tokens, counts, alone)
        results = about | {"questions": first + len(batch), "results": results_of(counts)}
        write_json(output, results)
    table = [[str(value) for value in row.values()] for row in results_of(counts)]
    columns = ["way", "temperature", "rows", *COUNTED]
    print_table(Table("answers that are not plain decoding's", columns, table))


if __name__ == "__main__":
    typer.run(main)
