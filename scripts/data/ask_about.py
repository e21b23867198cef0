"""`drafthead ask-about`: prompts that ask something of given texts."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.errors import UserError
from drafthead.heads.storage.files import write_text
from drafthead.scripts import options
from drafthead.train.data.conversations import iter_conversations
from drafthead.train.prompts.tasks import FEWEST_PASSAGES, Tasks, prompts_about, texts_of

TASKS = Path(str(files("drafthead.configs") / "prompts" / "tasks.yaml"))


def main(
    data: Annotated[
        str, typer.Option(help="Conversations whose answers are the texts, as of distill.")
    ],
    number: Annotated[int, typer.Option(help="Prompts to write.", callback=options.at_least_one)],
    output: Annotated[Path, typer.Option(help="JSONL file to write; it must be new.")],
    tasks: Annotated[
        Path | None,
        typer.Option(help="What is asked: YAML as configs/prompts/tasks.yaml, the default."),
    ] = None,
    passages: Annotated[
        int,
        typer.Option(
            help="Most passages of a prompt, of about 150 tokens each.",
            min=FEWEST_PASSAGES,
        ),
    ] = 6,
    seed: Annotated[int, typer.Option(help="Same seed and data, same file.")] = 0,
) -> None:
    """Write prompts that ask for summaries, translations and answers about given texts.

    The texts are answers that a model has written, so no data set is needed. Messages that a model
    invents are short; these are long, and distill answers both. A third is about one text, a third
    about two, a third about several passages, as of a retriever. No model runs here.
    """
    if output.exists():
        raise UserError(f"{output} exists: choose another file")
    texts = texts_of(iter_conversations(data))
    prompts = prompts_about(texts, Tasks.read(tasks or TASKS), number, seed, passages)
    rows = [
        {"id": f"about-{seed}-{place}", "prompt": prompt} for place, prompt in enumerate(prompts)
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(output, lines)
    typer.echo(f"{output}: {len(rows)} prompts about {len(texts)} texts")
