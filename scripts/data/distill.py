"""`drafthead data distill`: write the target's own answers to prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from drafthead.core.errors import UserError
from drafthead.core.settings import AtLeastOne, CompileSwitch, settings
from drafthead.scripts import options
from drafthead.train.data.left_out import LeftOut
from drafthead.train.jobs.outputs import full_disk_named
from drafthead.train.settings import AnsweringOptions, DistillSettings

if TYPE_CHECKING:
    from drafthead.train.distillation.answer_source import AnswerSource
    from drafthead.train.distillation.server import ServerSource
    from drafthead.train.distillation.windows import WindowSource


@settings(kw_only=True)
class Asked(options.Rows):
    """Options of what is asked."""

    prompts: options.Prompts
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
    """Options of where prompts are answered, and answers written."""

    output: options.NewRows
    compile: CompileSwitch = None
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="Let this OpenAI-compatible server answer. Repeat it for several servers of one "
            "model. The API key is read from OPENAI_API_KEY."
        ),
    ] = None
    server_model: options.ServerModel = None
    ray: Annotated[
        str | None,
        typer.Option(
            help="Let a Ray cluster answer, with a copy of the model on each GPU or, where there "
            "is none, on each --ray-cores cores. auto: the cluster of this machine, or all of "
            "this machine.",
            metavar="auto|ADDRESS",
        ),
    ] = None
    ray_cores: Annotated[
        AtLeastOne | None,
        Field(description="Cores of each copy. Default: those of the smallest machine."),
    ] = None
    overwrite: options.Overwrite = False


def main(*, model: options.Model, asked: Asked, answered: AnsweringOptions, where: Where) -> None:
    """Generate the model's own answers to prompts. All user turns are answered in order."""
    from drafthead.core.target.chat_template import check_template_arguments
    from drafthead.lab.reports.data_set import print_report
    from drafthead.train.data.conversations import read_conversations
    from drafthead.train.distillation.answers import distill
    from drafthead.train.distillation.dialogue import sampled, with_system
    from drafthead.train.distillation.distilled_file import DistilledFile

    refuse_unheeded(model, where)
    served = from_servers(model, where) if where.server else None
    settings = DistillSettings(
        model.target, asked.prompts, asked.prompt_column, model.dtype, system_text(asked.system),
        asked.template_arguments, served.model.name if served else None, **vars(answered),
    )  # fmt: skip
    file = DistilledFile(where.output, settings, where.overwrite)
    file.check()  # before much is read
    left_out = LeftOut(asked.strict)
    rows = read_conversations(asked.prompts, asked.prompt_column, asked.limit, left_out)
    rows = sampled(with_system(rows, settings.system), asked.samples, answered.temperature)
    with full_disk_named(where.output), file:
        source = served or source_of(model, where)
        check_template_arguments(source.tokenizer, settings.template_arguments)
        print_report(distill(source, rows, file, left_out), where.output)


def refuse_unheeded(model: options.Model, where: Where) -> None:
    """Raise UserError for options that have no meaning beside the others."""
    if where.server is None and where.server_model is not None:
        raise UserError("--server-model names a model on a server: give --server too")
    if where.ray is None and where.ray_cores is not None:
        raise UserError("--ray-cores is for copies of the model in a cluster: give --ray too")
    if where.server is not None:
        local = {
            "--dtype": model.dtype != "auto", "--device": model.device != "auto",
            "--compile": where.compile, "--ray": where.ray,
        }  # fmt: skip
        options.refuse(local, "with --server the answers are made elsewhere")


def from_servers(model: options.Model, where: Where) -> "ServerSource":
    """The model on servers; raises UserError if none is there, and if two serve other models."""
    from drafthead.core.target.any_target import tokenizer_named
    from drafthead.train.distillation.connection import stored_end_ids, stored_penalty
    from drafthead.train.distillation.server import ServerSource
    from drafthead.train.distillation.server_pool import PooledServer

    tokenizer = tokenizer_named(model.target)
    servers = [PooledServer(url, where.server_model, model.target) for url in where.server or ()]
    ends, penalty = stored_end_ids(model.target, tokenizer), stored_penalty(model.target)
    return ServerSource(servers, tokenizer, ends, penalty)


def source_of(model: options.Model, where: Where) -> "AnswerSource | WindowSource":
    """The model in this process, or copies of it in a cluster."""
    if where.ray is None:
        from drafthead.infer import Decoder
        from drafthead.train.distillation.answer_source import DecoderSource

        return DecoderSource(Decoder.from_pretrained(model.load(), compile=where.compile))
    from drafthead.train.distillation.ray_actors import Loading, RayActors

    loading = Loading(model.target, model.dtype, model.device, where.compile)
    return RayActors(where.ray, loading, where.ray_cores)


def system_text(given: str | None) -> str | None:
    """The system message of --system; raises UserError for a file that cannot be read."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--system {given}: the file cannot be read as text ({error})") from error
