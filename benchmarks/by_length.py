"""Speed with drafts over plain decoding by length of the prompt: `benchmarks/by_length.py --help`.

The prompts are the beginnings of a text that you name, of so many tokens, with a request after it:
to repeat the text's end, which copies, and to say what it is about, which does not. A prompt is
read once, after what it begins with; its answer is decoded plainly and with drafts in turns, the
first time uncounted. The exit status is 1 where texts differ.
"""

import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from recorded import write_record
from tqdm import tqdm

from drafthead.infer import Decoder
from drafthead.lab.reports.report import Table, number, print_table

ASKED = {
    "copies": "Write the last 60 lines of this text once more, without any comments.",
    "explains": "Explain in your own words what this text is about.",
}
COLUMNS = "tokens before", "answer", "plain tokens/s", "tokens/s", "speedup", "tau"


def prompt_of(decoder: Decoder, text: list[int], length: int, asked: str) -> list[int]:
    """A prompt of about so many tokens."""
    assert decoder.tokenizer is not None
    beginning = decoder.tokenizer.decode(text[: length - 64])
    messages = [{"role": "user", "content": f"```\n{beginning}\n```\n\n{asked}"}]
    found: list[int] = decoder.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return found


def measured(decoder: Decoder, prompt: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """The speeds of decoding an answer plainly and with drafts, in turns."""
    plain = decoder.with_drafts(None)
    plain.memory = decoder.memory
    decoder.remember(prompt)
    speeds: dict[str, list[float]] = {"plain": [], "drafts": []}
    answers, tau = set[tuple[int, ...]](), 0.0
    for _ in range(rounds + 1):
        for name, way in (("plain", plain), ("drafts", decoder)):
            found = way.generate(prompt, max_new_tokens=tokens)
            count = len(found.sequences[0]) - 1
            assert count > 0, "an answer of one token has no speed"
            speeds[name].append(count / found.stats.decode_seconds)
            answers.add(tuple(found.sequences[0]))
            tau = found.stats.tau
    # The first round also measures what passes cost.
    ratios = [b / a for a, b in zip(*(each[1:] for each in speeds.values()), strict=True)]
    return {
        "tokens before": len(prompt),
        "plain tokens/s": median(speeds["plain"][1:]),
        "tokens/s": median(speeds["drafts"][1:]),
        "speedup": median(ratios),
        "tau": tau,
        "texts": len(answers),
    }


def main(
    text: Annotated[list[Path], typer.Option(help="Files to join. Repeatable.")],
    output: Annotated[Path, typer.Option(help="JSON file for what is found.")],
    target: Annotated[str, typer.Option(help="The target.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Number type of its weights.")] = "auto",
    draft: Annotated[list[str] | None, typer.Option(help="Default lookup. Repeatable.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens. Repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 2,
) -> None:
    """Decode answers to prompts of several lengths."""
    drafts = draft or ["lookup"]
    decoder = Decoder.from_pretrained(target, draft=drafts, dtype=dtype)
    assert decoder.tokenizer is not None
    ids = decoder.tokenizer.encode("\n".join(file.read_text() for file in text))
    rows = []
    turns = [(n, kind) for n in length or (500, 2000, 4000) for kind in ASKED]
    for count, kind in tqdm(turns, unit="answer"):
        prompt = prompt_of(decoder, ids, count, ASKED[kind])
        rows.append({"answer": kind, **measured(decoder, prompt, tokens, rounds)})
        write_record(output, {"target": target, "draft": drafts, "rows": rows})
    cells = [
        [number(row[name]) if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        for row in rows
    ]
    print_table(Table("By length", COLUMNS, cells))
    sys.exit(any(row["texts"] > 1 for row in rows))


if __name__ == "__main__":
    typer.run(main)
