"""Options that several verbs share: alone, and in groups.

A group is a dataclass whose fields are options; a verb that has it as a parameter has all of them.
Its methods make what they describe. Like all files of verbs this one imports no torch at the top.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from importlib import resources
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

from drafthead.core.errors import UserError, first_line

if TYPE_CHECKING:
    from drafthead.core.target.target import Target
    from drafthead.infer import DecodeOptions, Decoder
    from drafthead.lab.reports.report import Report
    from drafthead.train.data.fitted_rows import Reading


Settings = TypeVar("Settings")


class InterruptedVerbError(Exception):
    """Ctrl-C in a verb: typer would end the process at a KeyboardInterrupt, without a word."""


def with_groups(main: Callable[..., None]) -> Callable[..., None]:
    """A verb for typer, which knows no groups of options: their fields become its own options.

    The verb raises InterruptedVerbError instead of KeyboardInterrupt.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(main, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += group_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    for parameter in parameters:
        name_one_value(parameter.annotation)

    @wraps(main)
    def run(**options: Any) -> None:
        """The verb, with its groups made of their options."""
        made = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        try:
            main(**options, **made)
        except KeyboardInterrupt:
            raise InterruptedVerbError from None

    # What typer reads.
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def group_parameters(group: Any) -> list[Parameter]:
    """The fields of a group as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def name_one_value(annotation: Any) -> None:
    """Have help show an option that may be repeated as its value, `<str>`, not as `<list[str]>`."""
    hint, *about = get_args(annotation) or [annotation]
    lists = [part for part in (hint, *get_args(hint)) if get_origin(part) is list]
    for option in about:
        if lists and isinstance(option, ParameterInfo) and option.metavar is None:
            option.metavar = f"<{get_args(lists[0])[0].__name__.lower()}>"


def made_of(kind: type[Settings], groups: Sequence[object], others: Mapping[str, Any]) -> Settings:
    """Settings, a dataclass, out of the options of groups with the same names and of `others`."""
    given: dict[str, Any] = {}
    for values in (*map(vars, groups), others):
        given |= values
    return kind(**{field.name: given[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def at_least_one(option: typer.CallbackParam, value: int) -> int:
    """The value; raises UserError if it is below 1, before anything is loaded."""
    if value < 1:
        raise UserError(f"{option.opts[0]} must be at least 1, got {value}")
    return value


TargetName = Annotated[str, typer.Option(help="Target model: folder, GGUF file or hub id.")]
DtypeName = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, float16; or a lossy copy of the model: int7, with weights "
        "of seven bits, of which compiled passes on a CPU read half as much; int8 or int4, those "
        "of bitsandbytes, uncompiled."
    ),
]
DeviceName = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
HeadPath = Annotated[
    Path,
    typer.Argument(
        help="Trained head: a folder or a file of any known format, or OWNER/NAME on the hub.",
        metavar="HEAD",
    ),
]
Prompt = Annotated[str | None, typer.Option(help="The user's message; by default standard input.")]
PromptLimit = Annotated[
    int, typer.Option(help="Use this many prompts, from the first.", callback=at_least_one)
]
AnswerLimit = Annotated[
    int,
    typer.Option(
        help="Use this many conversations of a file, from the first.", callback=at_least_one
    ),
]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", help="Prompts that are decoded together.", callback=at_least_one),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most new tokens in an answer.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable mass; 1 keeps all.")]
Seed = Annotated[
    int, typer.Option(help="For sampled answers: same seed, same answer (with the same tree size).")
]
CompileSwitch = Annotated[
    bool | None,
    typer.Option(
        help="Compile the passes: minutes the first time, then faster. Without, a GPU records "
        "them, and a CPU runs our kernels; with --no-compile they run as the model is written."
    ),
]
# What `train --init` and `build --family` take, and `head export --format`.
FILES = [Path(file.name) for file in resources.files("drafthead.configs").iterdir()]
FAMILIES = ", ".join(sorted(f.stem for f in FILES if f.suffix == ".yaml" and "demo" not in f.stem))
FORMATS = (
    "dflash, dflash-transformers, dspark, eagle, eagle3-sglang, eagle3-vllm, hydra, medusa, "
    "medusa-merged, vllm-medusa, mlp, mtp, speculators, drafthead"
)
RULES = (
    "Acceptance rule: auto, greedy, rejection, traversal and match are lossless. Lossy ones change "
    "the output: typical, lenient, and at temperature 0 top_k and distance"
)
RuleName = Annotated[str, typer.Option(help=f"{RULES}.")]
Rule = Annotated[
    str,
    typer.Option(
        help=f"{RULES}, with options as in typical:typical_epsilon=0.1,typical_delta=0.3.",
        metavar="NAME[:OPTION=VALUE,...]",
    ),
]
TemplateArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--template-argument",
        help="Of the chat template, its value as JSON: enable_thinking=false. May be repeated. "
        "Rows that have their own keep those.",
        metavar="NAME=VALUE",
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(help="Column that holds the user's text, whatever other columns there are."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="End at the first row that cannot be used; else it is left out."),
]
NewFolder = Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")]
JsonFile = Annotated[Path | None, typer.Option(help="JSON file to write.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start the output from the beginning.")
]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The target, and how it is loaded."""

    target: TargetName
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"

    def load(self) -> "Target":
        """The loaded model, a decoder-only one; raises UserError for any other."""
        from drafthead.core.target.any_target import load_decoder_only

        return load_decoder_only(self.target, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What drafts, and how much."""

    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="What proposes tokens: the folder or hub id of a head or a draft model, lookup "
            "(what followed the same words in prompt and answer), ngrams:FOLDER of data index, "
            "mtp or layers:0-9 of the target itself. Repeatable: lookup and ngrams go beside "
            "others.",
            metavar="WHAT",
        ),
    ] = None
    tree_nodes: Annotated[
        int | None,
        typer.Option(help="Nodes of every proposal, root included; by default planned by cost."),
    ] = None
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens on a path of a draft model, own layers or lookup; 4 by default."
        ),
    ] = None
    same_bits: Annotated[
        bool,
        typer.Option(
            "--same-bits",
            help="In 16 bits without our kernels: every pass reads 16 tokens, so that the text is "
            "that of plain decoding with this option. Passes are dearer.",
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


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How long answers become, and how their tokens are chosen."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Anything of transformers' GenerationConfig, and frequency_penalty and "
            "presence_penalty: min_p=0.1, repetition_penalty=1.2, stop_strings=END, max_time=5, "
            "num_beams=4, num_return_sequences=2. Repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None
    seed: Seed = 0
    template_argument: TemplateArgument = None

    def options(self, rule: str = "auto", logprobs: int | None = None) -> "DecodeOptions":
        """Keywords for `Decoder.generate`, `stream` and `chat`.

        A rule comes with its options: "top_k:accept_top=3" is `verifier="top_k"` and
        `accept_top=3`. Raises UserError as `values`.
        """
        from transformers.generation.configuration_utils import GenerationConfig

        from drafthead.infer.request.generation_config import checked_options

        given = values(self.setting, "--set", plain_text=True)
        if own := sorted(given.keys() & {field.name for field in fields(self)}):
            raise UserError(f"--set {own[0]}: write --{own[0].replace('_', '-')} instead")
        if "do_sample" in given:
            raise UserError("--set do_sample: a --temperature above 0 samples, leave it out")
        checked_options(given)
        try:
            config = GenerationConfig(do_sample=self.temperature > 0, **given)
        except ValueError as error:
            raise UserError(f"--set: {first_line(error)}") from error
        name, _, of_rule = rule.partition(":")
        keywords: Any = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
            "generation_config": config,
            "chat_template_kwargs": template_values(self.template_argument),
            "verifier": name,
            "logprobs": logprobs,
        }
        return keywords | values(of_rule.split(",") if of_rule else None, "--rule")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How rows of data are read."""

    prompt_column: PromptColumn = None
    template_argument: TemplateArgument = None
    strict: Strict = False

    def reading(self, source: str, max_length: int, limit: int | None) -> "Reading":
        """How a source is read, cut to a number of tokens and of conversations."""
        from drafthead.train.data.fitted_rows import Reading

        arguments = template_values(self.template_argument)
        return Reading(
            source, self.prompt_column, max_length, limit,
            template_arguments=arguments, strict=self.strict,
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


def template_values(given: list[str] | None) -> dict[str, Any]:
    """The arguments of a chat template by name; raises UserError as `values`."""
    return values(given, "--template-argument")


def values(given: list[str] | None, option: str, plain_text: bool = False) -> dict[str, Any]:
    """What is written NAME=VALUE, by name, with values that are JSON.

    With `plain_text` other values are texts, and a name that is given again becomes a list. Raises
    UserError, which names the option, for another form.
    """
    found: dict[str, Any] = {}
    for one in given or ():
        name, equals, text = one.partition("=")
        if not name.isidentifier() or not equals:
            raise UserError(f"{option} is written NAME=VALUE, got {one}")
        if name in found and not plain_text:
            raise UserError(f"{option} {name} is given twice")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            if not plain_text:
                raise UserError(
                    f"{option} {one}: {text or 'nothing'} is no JSON; write true, false, "
                    f"numbers, or text in double quotes: '{name}=\"text\"'"
                ) from error
            value = text
        found[name] = [*listed(found[name]), value] if name in found else value
    return found


def listed(value: Any) -> list[Any]:
    """A list as it is, and anything else as the only one of a list."""
    return value if isinstance(value, list) else [value]
