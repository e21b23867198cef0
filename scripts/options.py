"""Options that several verbs share: alone, and in groups.

A group is a dataclass whose fields are options; a verb that has it as a parameter has all of them.
Its methods make what they describe. Like all files of verbs this one imports no torch at the top.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import Field
from pydantic.fields import FieldInfo
from typer.models import ParameterInfo

from drafthead.core.errors import UserError, first_line
from drafthead.core.settings import (
    RULES,
    AtLeastOne,
    DeviceName,
    DtypeName,
    InShell,
    MaxNewTokens,
    Refusing,
    Seed,
    TargetName,
    Temperature,
    TemplateArguments,
    TopK,
    TopP,
    checked,
    declarations,
    help_of,
    listed,
    names_of,
    settings,
    values,
)
from drafthead.core.storage import large_pages
from drafthead.core.storage.files import write_text
from drafthead.core.storage.names import (
    refuse_missing_data,
    refuse_missing_draft,
    refuse_missing_head,
    refuse_missing_model,
)
from drafthead.core.target.gguf_files import gguf_of

if TYPE_CHECKING:
    from drafthead.core.target.target import Target
    from drafthead.infer import Decoder
    from drafthead.lab.reports.report import Report
    from drafthead.train.data.fitted_rows import Reading


class InterruptedVerbError(Exception):
    """Ctrl-C in a verb: typer would end the process at a KeyboardInterrupt, without a word."""


def with_groups(main: Callable[..., None]) -> Callable[..., None]:
    """A verb for typer, which knows no groups of options: their fields become its own options.

    The verb raises InterruptedVerbError instead of KeyboardInterrupt.
    """
    declared = signature(main, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in declared.items() if is_dataclass(p.annotation)
    }
    found: list[Parameter] = []
    for name, parameter in declared.items():
        found += signature(groups[name]).parameters.values() if name in groups else [parameter]
    options = [*map(as_option, found)]

    @wraps(main)
    def run(**given: Any) -> None:
        """The verb, with its groups made of their options."""
        for name, group in groups.items():
            own = {option: given.pop(option) for option in names_of(group)}
            given[name] = group(**{o: value for o, value in own.items() if value is not None})
        try:
            main(**given)
        except KeyboardInterrupt:
            raise InterruptedVerbError from None

    # What typer reads.
    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def as_option(parameter: Parameter) -> Parameter:
    """A parameter as typer reads one: what it declares is its help, and checks what is given."""
    declared, default = parameter.annotation, parameter.default
    if default is not Parameter.empty and not isinstance(default, str | int | float | Path):
        default = None  # the field's own default is taken then
    parts = [*declarations(declared)]
    option = next((copy(part) for part in parts if isinstance(part, ParameterInfo)), None)
    if option is None:
        names = [part.option for part in parts if isinstance(part, InShell)]
        if default is False and not names:
            names = [f"--{parameter.name.replace('_', '-')}"]  # no --no-...
        option = typer.Option(*names)
    option.help = option.help or help_of(declared)
    kind = shell_type(declared)
    if get_origin(kind) is list:  # help shows one value, `<str>`, and not `<list[str]>`
        is_mapping = dict in [get_origin(part) for part in parts]
        shown = "NAME=VALUE" if is_mapping else f"<{get_args(kind)[0].__name__.lower()}>"
        option.metavar = option.metavar or shown

    def check(option: typer.CallbackParam, value: Any) -> Any:
        """The value as it came; UserError with the option's name for one that does not fit."""
        if value in (None, []):
            return None
        checked(option.opts[0], declared, value)
        for part in parts:
            for name in listed(value) if isinstance(part, Refusing) else ():
                part.refuse(str(name))
        return value

    if option.callback is None and any(isinstance(part, FieldInfo | Refusing) for part in parts):
        option.callback = check
    hint: Any = Annotated[kind | None if default is None else kind, option]
    return parameter.replace(annotation=hint, default=default, kind=Parameter.KEYWORD_ONLY)


def shell_type(declared: Any) -> Any:
    """The type that typer knows: a list for a tuple and a mapping; without what is declared."""
    origin, inner = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return shell_type(inner[0])
    if origin in (Union, UnionType):
        return next(shell_type(each) for each in inner if each is not type(None))
    if origin in (list, tuple):
        return list[shell_type(inner[0])]  # type: ignore[misc]
    return list[str] if origin is dict else declared


# Of names: what they mean is looked for before anything is imported.
OfModel, OfHead = Refusing(refuse_missing_model), Refusing(refuse_missing_head)
OfDraft, OfData = Refusing(refuse_missing_draft), Refusing(refuse_missing_data)
HeadPath = Annotated[
    Path,
    OfHead,
    typer.Argument(
        help="The head: a folder or file in any known format, OWNER/NAME on the hub, or "
        "smollm2-eagle3.",
        metavar="HEAD",
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(help="The user's message. Read from standard input if you leave it out."),
]
Named = Annotated[TargetName, OfModel]
HeadTarget = Annotated[
    str | None,
    OfModel,
    typer.Option(
        help="The head's target. It supplies what the head's files lack, and copies of its weights "
        "are compared with it. Also needed to export drafters that are not heads."
    ),
]
PROMPTS = "Prompts: a JSON, JSONL or Parquet file, a folder or a data set."
Prompts = Annotated[
    str, OfData, typer.Option(help=f"{PROMPTS} Spec-Bench's question file works unchanged.")
]
Questions = Annotated[
    str | None, OfData, typer.Option(help=f"{PROMPTS} By default a few questions.")
]
OwnAnswers = Annotated[
    str,
    OfData,
    typer.Option(
        help="The model's own answers: a file of `data distill`, or logs. Do not measure on data "
        "of the training."
    ),
]
ServerModel = Annotated[
    str | None, typer.Option(help="Name of the model on the server, if it serves several.")
]
NewRows = Annotated[
    Path, typer.Option(help="JSONL file to write. Run the same command again to continue it.")
]
PromptLimit = Annotated[
    AtLeastOne, Field(description="Number of prompts to use, from the start of the file.")
]
AnswerLimit = Annotated[
    AtLeastOne, Field(description="Number of conversations to use, from the start of each file.")
]
PACKED = 7 / 8  # of a GGUF file's bytes, at least: rows of embeddings are read where they lie
FORMATS = (  # that `head export --format` takes
    "dflash, dflash-transformers, dspark, eagle, eagle3-sglang, eagle3-vllm, hydra, medusa, "
    "medusa-merged, vllm-medusa, mlp, mtp, speculators, drafthead"
)
Rule = Annotated[
    str,
    typer.Option(
        help=f"{RULES}, with options as in typical:typical_epsilon=0.1,typical_delta=0.3.",
        metavar="NAME[:OPTION=VALUE,...]",
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(help="Name of the column with the user's text."),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Stop at the first row that cannot be used instead of skipping it."
    ),
]
NewFolder = Annotated[Path, typer.Option(help="Output folder. It must be new or empty.")]
JsonFile = Annotated[Path | None, typer.Option(help="Also write the results to this JSON file.")]


def a_page(path: Path) -> Path:
    """The path of a page; raises UserError for one that no browser takes for a page."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {path} must end in .html: it is a page for a browser")
    return path


def write_page(path: Path, html: str) -> None:
    """Write a page, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    typer.echo(f"{path} is written: open it in a browser")


PageFile = Annotated[Path, typer.Option(help="HTML file to write.", callback=a_page)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start again instead of continuing the output file.")
]


@contextmanager
def starting(model: "Model") -> Iterator[None]:
    """Within it a verb imports and loads what it runs with, and the garbage collector waits.

    All that is made then stays, so looking through it again and again would find nothing: it takes
    a tenth of a start. Nor is it looked through later. Memory for the model's blocks is touched
    meanwhile.
    """
    gc.disable()
    try:
        if size := model.packed_bytes():
            large_pages.ahead.touch(size)
        yield
    finally:
        large_pages.ahead.taken()
        gc.freeze()
        gc.enable()


@settings(kw_only=True)
class Model:
    """The target, and how it is loaded."""

    target: Named
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"

    def packed_bytes(self) -> int:
        """The bytes of memory that weights which stay in blocks will take at least.

        Raises UserError as `gguf_of`.
        """
        stay = self.dtype == "auto" and self.device in ("auto", "cpu")
        file = gguf_of(self.target) if stay else None
        return 0 if file is None else int(PACKED * file.stat().st_size)

    def load(self) -> "Target":
        """The loaded model, a decoder-only one; raises UserError for any other."""
        from drafthead.core.target.any_target import load_decoder_only

        return load_decoder_only(self.target, self.dtype, self.device)


@settings(kw_only=True)
class Drafting:
    """Options of what drafts, and how much."""

    draft: Annotated[
        list[str] | None,
        OfDraft,
        typer.Option(
            help="What proposes tokens: a head or draft model (folder or hub id), smollm2-eagle3 "
            "(the head for smollm2 that comes with drafthead), lookup (copies from the prompt"
            " and answer), ngrams:FOLDER (a table from `data index`), or mtp or layers:0-9 "
            "(parts of the model itself). Repeat it to add lookup or ngrams to another "
            "drafter.",
            metavar="WHAT",
        ),
    ] = None
    tree_nodes: Annotated[
        int | None,
        typer.Option(
            help="Fixed size of draft trees in nodes, root included. By default chosen "
            "while decoding, from measured costs."
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per draft of a draft model, of the model's own layers, or of "
            "lookup alone. Default 4."
        ),
    ] = None
    same_bits: Annotated[
        bool,
        typer.Option(
            "--same-bits",
            help="Make 16-bit text identical to plain decoding where our CPU kernels are not "
            "available, by padding every pass to 16 tokens. Slower.",
        ),
    ] = False

    def decoder(
        self, model: Model, compile: bool | None = None, draft_temperature: float | None = None
    ) -> "Decoder":
        """The target with its drafter; raises UserError for what cannot be loaded or combined."""
        from drafthead.infer import Decoder

        return Decoder.from_pretrained(
            model.target, self.draft, self.tree_nodes, self.draft_tokens, draft_temperature,
            model.dtype, model.device, compile=compile, same_bits=self.same_bits,
        )  # fmt: skip


@settings(kw_only=True)
class Answers:
    """Options of how long answers become, and how their tokens are chosen."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any other setting of transformers' GenerationConfig, and frequency_penalty and "
            "presence_penalty. For example min_p=0.1, repetition_penalty=1.2, "
            "stop_strings=END, max_time=5, num_beams=4, num_return_sequences=2. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None
    seed: Seed = 0
    template_arguments: TemplateArguments = field(default_factory=dict)

    def options(self, rule: str = "auto", logprobs: int | None = None) -> dict[str, Any]:
        """Keywords for `Decoder.generate`, `stream` and `chat`.

        Raises UserError as `values`.
        """
        from transformers.generation.configuration_utils import GenerationConfig

        from drafthead.infer.request.generation_config import check_supported

        given = values(self.setting, "--set", plain_text=True)
        if own := sorted(given.keys() & {field.name for field in fields(self)}):
            raise UserError(f"--set {own[0]}: write --{own[0].replace('_', '-')} instead")
        if "do_sample" in given:
            raise UserError("--set do_sample: a --temperature above 0 samples, leave it out")
        check_supported(given)
        try:
            config = GenerationConfig(do_sample=self.temperature > 0, **given)
        except ValueError as error:
            raise UserError(f"--set: {first_line(error)}") from error
        others = ("setting", "template_arguments")
        return {
            **{name: value for name, value in vars(self).items() if name not in others},
            "generation_config": config, "chat_template_kwargs": self.template_arguments,
            "verifier": rule, "logprobs": logprobs,
        }  # fmt: skip


@settings(kw_only=True)
class Rows:
    """Options of how rows of data are read."""

    prompt_column: PromptColumn = None
    template_arguments: TemplateArguments = field(default_factory=dict)
    strict: Strict = False

    def reading(self, source: str, max_length: int, limit: int | None) -> "Reading":
        """The reading of a source, cut to a number of tokens and of conversations."""
        from drafthead.train.data.fitted_rows import Reading

        return Reading(
            source, self.prompt_column, max_length, limit,
            template_arguments=self.template_arguments, strict=self.strict,
        )  # fmt: skip


def refuse(given: Mapping[str, object], reason: str) -> None:
    """Raise UserError, with the reason, for the first option that is given: that is not false."""
    if named := [name for name, value in given.items() if value]:
        raise UserError(f"{reason}: leave {named[0]} out")


def finish(report: "Report", path: Path | None) -> None:
    """Show a report, and write its files beside the JSON file at the path, if there is one."""
    report.show()
    if path is not None:
        report.write(path)
