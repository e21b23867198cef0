"""`drafthead distill`: write the target's own answers to prompts, one JSON row a conversation."""

from pathlib import Path

from drafthead.heads.errors import UserError
from drafthead.heads.target.chat_template import check_template_arguments
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.lab.reports.answers import print_answers, some
from drafthead.scripts import options
from drafthead.scripts.data import distill_options as own
from drafthead.scripts.data.inspect_data import load_tokenizer
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.left_out import LeftOut
from drafthead.train.distillation.answer_source import AnswerSource, DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.dialogue import sampled, with_system
from drafthead.train.distillation.distilled_file import DistilledFile, DistillSettings, Shard
from drafthead.train.distillation.server import (
    Connection,
    ServedModel,
    ServerSource,
    find_model,
    stored_end_ids,
    stored_penalty,
)
from drafthead.train.jobs.outputs import full_disk_named


def print_report(report: DistillReport, path: Path) -> None:
    """Print what was written, figures of all answers in the file, and what was left out."""
    speed = report.tokens / report.seconds if report.seconds else 0.0
    notes = [
        f"{report.written:,} rows written, {report.already_done:,} were there before; "
        f"{report.tokens:,} tokens at {speed:,.0f} tokens/s"
    ]
    if report.too_long:
        notes.append(
            f"{len(report.too_long):,} prompts longer than the context were skipped: "
            f"{some(report.too_long)}"
        )
    if report.shortened:
        notes.append(
            f"{len(report.shortened):,} conversations lost later turns that did not fit into the "
            f"context, or that the chat template refused: {some(report.shortened)}"
        )
    print_answers(report.statistics, str(path), report.dropped, notes)


def on_server(url: str, name: str | None, target: str) -> tuple[Connection, ServedModel]:
    """The server, and the model there; UserError if nothing answers or no such model is there."""
    connection = Connection(url)
    return connection, find_model(connection, name, target)


def refuse_local_options(dtype: str, device: str, compile: bool) -> None:
    """Raise UserError for an option that a server would not heed."""
    given = {"--dtype": dtype != "auto", "--device": device != "auto", "--compile": compile}
    if named := [name for name, is_given in given.items() if is_given]:
        raise UserError(f"with --server the answers are made elsewhere: leave {named[0]} out")


def main(
    target: options.TargetName,
    prompts: own.Prompts,
    output: own.Output,
    # What is asked.
    prompt_column: options.PromptColumn = None,
    limit: own.Limit = None,
    system: own.System = None,
    template_argument: options.TemplateArgument = None,
    strict: options.Strict = False,
    # How it is answered.
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: own.Seed = 0,
    samples: own.Samples = 1,
    batch_size: own.BatchSize = 32,
    end_repetition: own.EndRepetition = True,
    drop_cut: own.DropCut = False,
    # Where it is answered, and written.
    dtype: options.DtypeName = "auto",
    device: options.DeviceName = "auto",
    compile: options.CompileSwitch = False,
    server: own.Server = None,
    server_model: own.ServerModel = None,
    shard: own.ShardOfAll = None,
    overwrite: own.Overwrite = False,
) -> None:
    """Write the target's own answers to prompts; all user turns are answered in order."""
    part = None if shard is None else Shard.parse(shard)
    served = None
    if server is not None:
        refuse_local_options(dtype, device, compile)
        served = on_server(server, server_model, target)
    elif server_model is not None:
        raise UserError("--server-model names a model on a server: give --server too")
    settings = DistillSettings(
        target=target,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prompt_column=prompt_column,
        dtype=dtype,
        batch_size=batch_size,
        end_repetition=end_repetition,
        system=own.system_text(system),
        template_arguments=options.template_values(template_argument),
        drop_cut=drop_cut,
        server_model=served[1].name if served else None,
    )
    path = Path(output) if part is None else part.path(Path(output))
    file = DistilledFile(path, settings, overwrite, part)
    file.check()  # before much is read
    left_out = LeftOut(strict)
    conversations = read_conversations(prompts, prompt_column, limit, left_out)
    conversations = sampled(with_system(conversations, settings.system), samples, temperature)
    with full_disk_named(path), file:
        source = source_of(served, settings, device, compile)
        print_report(distill(source, conversations, file, left_out), path)


def source_of(
    served: tuple[Connection, ServedModel] | None,
    settings: DistillSettings,
    device: str,
    compile: bool,
) -> AnswerSource:
    """Who answers; raises UserError for template arguments that the template does not read."""
    source: AnswerSource
    if served is None:
        loaded = Target.from_pretrained(settings.target, settings.dtype, device)
        source = DecoderSource(Decoder.from_pretrained(loaded, compile=compile))
    else:
        tokenizer = load_tokenizer(settings.target)
        ends, penalty = stored_end_ids(settings.target, tokenizer), stored_penalty(settings.target)
        source = ServerSource(*served, tokenizer, ends, penalty)
    check_template_arguments(source.tokenizer, settings.template_arguments)
    return source
