"""Conversations whose answers are the corpus's own functions, for prompts of the demo.

`python -m demo_models.references CONVERSATIONS OUTPUT` keeps the questions of
CONVERSATIONS and replaces each answer by the function that the question was cut from. Questions
whose function the installed packages no longer contain are left out.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from demo_models.corpus import Pair, read_corpus
from drafthead.core.errors import UserError
from drafthead.core.storage.files import write_text


def references(lines: list[str], pairs: list[Pair]) -> list[str]:
    """The conversations in `lines`, as JSON, whose question is one of `pairs`, with its answer."""
    answers = {pair.question: pair.answer for pair in pairs}
    answered = []
    for line in lines:
        conversation = json.loads(line)
        question = conversation["messages"][0]
        if question["content"] in answers:
            answer = {"role": "assistant", "content": answers[question["content"]]}
            answered.append(json.dumps({"id": conversation["id"], "messages": [question, answer]}))
    return answered


def main(
    conversations: Annotated[Path, typer.Argument(help="Such as runs/demo/answers.jsonl.")],
    output: Annotated[Path, typer.Argument(help="JSONL to write.")],
) -> None:
    """Write the corpus's own answers to the questions of a distilled file."""
    try:
        lines = conversations.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {conversations}: {error.strerror}") from error
    answered = references(lines, read_corpus())
    write_text(output, "\n".join(answered) + "\n")
    print(f"{len(answered)} of {len(lines)} questions answered by the installed sources: {output}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"drafthead: {error}")
