"""`drafthead data distill`: write the target's own answers to prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.scripts import options

if TYPE_CHECKING:
    from drafthead.train.distillation.answer_source import AnswerSource
    from drafthead.train.distillation.connection import Connection, ServedModel


@dataclass(frozen=True, kw_only=True)
class Asked(options.Rows):
    """What is asked."""

    prompts: Annotated[str, typer.Option(help="A .jsonl/.json/.parquet file, folder or data set.")]
    limit: Annotated[
        int | None, typer.Option(help="Answer only this many rows, from the first.")
    ] = None
    system: Annotated[
        str | None,
        typer.Option(
            help="System message of conversations without one: the text, or @FILE.",
            metavar="TEXT|@FILE",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Answered:
    """How it is answered."""

    max_new_tokens: options.MaxNewTokens = 256
    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    seed: Annotated[int, typer.Option(help="Each row's seed is made from this and its id.")] = 0
    samples: Annotated[
        int,
        typer.Option(help="Answers to each prompt, at a temperature above 0: rows ID, ID#2, ..."),
    ] = 1
    batch_size: Annotated[
        int, typer.Option(help="Conversations at a time; 8 times as many are written together.")
    ] = 32
    end_repetition: Annotated[
        bool, typer.Option(help="End answers whose last 32 tokens occurred twice before.")
    ] = True
    drop_cut: Annotated[
        bool,
        typer.Option("--drop-cut", help="Leave out rows with an answer that reached its limit."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where it is answered, and written."""

    output: Annotated[str, typer.Option(help="JSONL file to write; run again to resume.")]
    compile: options.CompileSwitch = None
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of an OpenAI-compatible server that answers; key: OPENAI_API_KEY."
        ),
    ] = None
    server_model: Annotated[
        str | None,
        typer.Option(help="The target's name on the server, if that has several models."),
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            help="Answer one of several parts, into a file of its own: 1/4 to 4/4. All of them "
            "are read under the name of --output.",
            metavar="NUMBER/COUNT",
        ),
    ] = None
    overwrite: options.Overwrite = False


def main(*, model: options.Model, asked: Asked, answered: Answered, where: Where) -> None:
    """Write the target's own answers to prompts; all user turns are answered in order."""
    from drafthead.core.target.chat_template import check_template_arguments
    from drafthead.lab.reports.data_set import print_report
    from drafthead.train.data.conversations import read_conversations
    from drafthead.train.data.left_out import LeftOut
    from drafthead.train.distillation.answers import distill
    from drafthead.train.distillation.dialogue import sampled, with_system
    from drafthead.train.distillation.distilled_file import DistilledFile, DistillSettings, Shard
    from drafthead.train.jobs.outputs import full_disk_named

    part = None if where.shard is None else Shard.parse(where.shard)
    served = served_model(model, where)
    settings = options.made_of(
        DistillSettings,
        (model, asked, answered),
        {
            "system": system_text(asked.system),
            "template_arguments": options.template_values(asked.template_argument),
            "server_model": served[1].name if served else None,
        },
    )
    path = Path(where.output) if part is None else part.path(Path(where.output))
    file = DistilledFile(path, settings, where.overwrite, part)
    file.check()  # before much is read
    left_out = LeftOut(asked.strict)
    rows = read_conversations(asked.prompts, asked.prompt_column, asked.limit, left_out)
    rows = sampled(with_system(rows, settings.system), answered.samples, answered.temperature)
    with full_disk_named(path), file:
        source = source_of(served, model, where.compile)
        check_template_arguments(source.tokenizer, settings.template_arguments)
        print_report(distill(source, rows, file, left_out), path)


def served_model(model: options.Model, where: Where) -> "tuple[Connection, ServedModel] | None":
    """The server that answers, and the model there; None without a server.

    Raises UserError for options that a server would not heed, if nothing answers, and if no such
    model is there.
    """
    from drafthead.train.distillation.connection import Connection, find_model

    if where.server is None:
        if where.server_model is not None:
            raise UserError("--server-model names a model on a server: give --server too")
        return None
    local = {
        "--dtype": model.dtype != "auto", "--device": model.device != "auto",
        "--compile": where.compile,
    }  # fmt: skip
    options.refuse(local, "with --server the answers are made elsewhere")
    connection = Connection(where.server)
    return connection, find_model(connection, where.server_model, model.target)


def source_of(
    served: "tuple[Connection, ServedModel] | None", model: options.Model, compile: bool | None
) -> "AnswerSource":
    """Who answers."""
    from drafthead.core.target.any_target import tokenizer_named
    from drafthead.infer import Decoder
    from drafthead.train.distillation.answer_source import DecoderSource
    from drafthead.train.distillation.connection import stored_end_ids, stored_penalty
    from drafthead.train.distillation.server import ServerSource

    if served is None:
        return DecoderSource(Decoder.from_pretrained(model.load(), compile=compile))
    tokenizer = tokenizer_named(model.target)
    ends, penalty = stored_end_ids(model.target, tokenizer), stored_penalty(model.target)
    return ServerSource(*served, tokenizer, ends, penalty)


def system_text(given: str | None) -> str | None:
    """The system message of --system; raises UserError for a file that cannot be read."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--system {given}: the file cannot be read as text ({error})") from error
