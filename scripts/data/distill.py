"""`drafthead data distill`: write the target's own answers to prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, CompileSwitch, settings
from drafthead.scripts import options
from drafthead.train.settings import Answering, DistillSettings

if TYPE_CHECKING:
    from drafthead.train.distillation.answer_source import AnswerSource
    from drafthead.train.distillation.connection import Connection, ServedModel


@settings(kw_only=True)
class Asked(options.Rows):
    """What is asked."""

    prompts: Annotated[
        str, typer.Option(help="Prompts: a .jsonl, .json or .parquet file, a folder or a data set.")
    ]
    limit: Annotated[
        int | None, typer.Option(help="Number of rows to answer, from the start of the file.")
    ] = None
    samples: Annotated[
        AtLeastOne,
        Field(description="Answers per prompt, at a temperature above 0; rows are ID, ID#2, ..."),
    ] = 1
    system: Annotated[
        str | None,
        typer.Option(
            help="System message for conversations that have none: a text, or @FILE.",
            metavar="TEXT|@FILE",
        ),
    ] = None


@settings(kw_only=True)
class Where:
    """Where it is answered, and written."""

    output: Annotated[
        str, typer.Option(help="JSONL file to write. Run the same command again to continue it.")
    ]
    compile: CompileSwitch = None
    server: Annotated[
        str | None,
        typer.Option(
            help="Let this OpenAI-compatible server answer. The API key is read from "
            "OPENAI_API_KEY."
        ),
    ] = None
    server_model: Annotated[
        str | None,
        typer.Option(help="Name of the model on the server, if it serves several."),
    ] = None
    shard: Annotated[
        str | None,
        typer.Option(
            help="Answer only this part of the prompts, such as 1/4, into its own file. Later "
            "commands read all parts under the name in --output.",
            metavar="NUMBER/COUNT",
        ),
    ] = None
    overwrite: options.Overwrite = False


def main(*, model: options.Model, asked: Asked, answered: Answering, where: Where) -> None:
    """Generate the model's own answers to prompts. All user turns are answered in order."""
    from drafthead.core.target.chat_template import check_template_arguments
    from drafthead.lab.reports.data_set import print_report
    from drafthead.train.data.conversations import read_conversations
    from drafthead.train.data.left_out import LeftOut
    from drafthead.train.distillation.answers import distill
    from drafthead.train.distillation.dialogue import sampled, with_system
    from drafthead.train.distillation.distilled_file import DistilledFile, Shard
    from drafthead.train.jobs.outputs import full_disk_named

    part = None if where.shard is None else Shard.parse(where.shard)
    served = served_model(model, where)
    settings = DistillSettings(
        model.target, asked.prompts, asked.prompt_column, model.dtype, system_text(asked.system),
        asked.template_arguments, served[1].name if served else None, **vars(answered),
    )  # fmt: skip
    path = Path(where.output) if part is None else part.path(Path(where.output))
    file = DistilledFile(path, settings, where.overwrite, part)
    file.check()  # before much is read
    left_out = LeftOut(asked.strict)
    rows = read_conversations(asked.prompts, asked.prompt_column, asked.limit, left_out)
    rows = sampled(with_system(rows, settings.system), asked.samples, answered.temperature)
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
