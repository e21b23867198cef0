"""Options that several verbs share: the same name, type and help everywhere."""

import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from drafthead.heads.errors import UserError


class InterruptedVerbError(Exception):
    """Ctrl-C in a verb: typer would end the process at a KeyboardInterrupt, without a word."""


def with_groups(main: Callable[..., None]) -> Callable[..., None]:
    """A verb for typer, which knows no groups of options: their fields become its own options.

    A parameter of `main` whose type is a dataclass is such a group. The verb raises
    InterruptedVerbError instead of KeyboardInterrupt.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(main, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += group_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(main)
    def run(**options: Any) -> None:
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


def at_least_one(option: typer.CallbackParam, value: int) -> int:
    """The value; raises UserError if it is below 1, before anything is loaded."""
    if value < 1:
        raise UserError(f"{option.opts[0]} must be at least 1, got {value}")
    return value


TargetName = Annotated[str, typer.Option(help="Target model: folder, GGUF file or hub id.")]
HEAD_HELP = "Trained head: a folder or a file of any known format, or OWNER/NAME on the hub."
HeadName = Annotated[Path | None, typer.Option(help=HEAD_HELP)]
NeededHeadName = Annotated[Path, typer.Option(help=HEAD_HELP)]
HeadNames = Annotated[list[Path] | None, typer.Option(help=f"{HEAD_HELP} Repeatable.")]
DraftModelName = Annotated[
    str | None, typer.Option(help="Separate draft model, with any tokenizer.")
]
DraftLayers = Annotated[
    str | None,
    typer.Option(help="Layers of the target that draft for it: 0-9, or 0-7,20-29."),
]
PromptLookupSwitch = Annotated[
    bool, typer.Option(help="Draft from the prompt and the answer so far.")
]
DatastoreFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of build-datastore: draft what the target has written before."),
]
PromptLimit = Annotated[
    int, typer.Option(help="Use this many prompts, from the first.", callback=at_least_one)
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
TreeNodes = Annotated[
    int | None,
    typer.Option(help="Nodes of every proposal, root included; by default planned by cost."),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens on a path of a draft model, own layers or lookup; 4 by default."
    ),
]
CompileSwitch = Annotated[
    bool, typer.Option(help="Compile the passes: minutes the first time, then faster.")
]
DtypeName = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, float16; or a lossy copy of the model: int7, with weights "
        "of seven bits, of which compiled passes on a CPU read half as much; int8 or int4, those "
        "of bitsandbytes, uncompiled."
    ),
]
DeviceName = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
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
HeadPath = Annotated[Path, typer.Argument(help=HEAD_HELP)]


def draft_names(
    head: Path | None = None,
    draft_model: str | None = None,
    draft_layers: str | None = None,
    prompt_lookup: bool = False,
    datastore: Path | None = None,
) -> list[str]:
    """What `Decoder.from_pretrained` takes as `draft`, of the options of a verb."""
    kinds = {"head": head, "model": draft_model, "layers": draft_layers, "ngrams": datastore}
    named = [f"{kind}:{value}" for kind, value in kinds.items() if value is not None]
    return [*named, *(["lookup"] if prompt_lookup else [])]


def template_values(given: list[str] | None) -> dict[str, Any]:
    """The arguments by name; raises UserError for one that is not NAME=VALUE with a JSON value."""
    values: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not name.isidentifier() or not equals:
            raise UserError(f"--template-argument is written NAME=VALUE, got {one}")
        if name in values:
            raise UserError(f"--template-argument {name} is given twice")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(
                f"--template-argument {one}: {value or 'nothing'} is no JSON; write true, false, "
                f"numbers, or text in double quotes: '{name}=\"text\"'"
            ) from error
    return values
