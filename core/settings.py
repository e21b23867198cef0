"""Settings: each is declared once, with its type, its bounds and its help, and read from anywhere.

A declaration is an annotated type; a concern is a class of them. Python's keywords, the options of
the shell, JSON and YAML are all read by these classes. This file imports no torch, so that the
command line can list options without it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial, wraps
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from drafthead.core.errors import UserError

Class = TypeVar("Class")
CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
# Quotients of logits up to 1e8 and temperatures from 1e-30 on are finite in float32.
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 1e-30, 1e30
BOUNDS = {
    "greater_than_equal": "at least", "greater_than": "above",
    "less_than_equal": "at most", "less_than": "below",
}  # fmt: skip
KINDS = {
    "bool": "True or False", "float": "a number", "int": "an integer", "string": "a text",
    "list": "a list", "tuple": "a list",
}  # fmt: skip


def plain(value: Any) -> Any:
    """A number of NumPy, or a tensor without dimensions, as Python's; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def values(given: Iterable[str] | None, option: str, plain_text: bool = False) -> dict[str, Any]:
    """Settings written NAME=VALUE, by name, with values that are JSON.

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
                    f"{option} {one}: {text or 'nothing'} is not JSON; write true, false, "
                    f"numbers, or text in double quotes: '{name}=\"text\"'"
                ) from error
            value = text
        found[name] = [*listed(found[name]), value] if name in found else value
    return found


def listed(value: Any) -> list[Any]:
    """A list as it is, and anything else as the only one of a list."""
    return value if isinstance(value, list) else [value]


def template_values(given: Any) -> Any:
    """The arguments of a chat template out of what the shell has for them."""
    return values(given, "--template-argument") if isinstance(given, list | None) else given


def in_float32(temperature: float) -> float:
    """A temperature over which logits up to 1e8 are finite in float32, or 0."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
        raise ValueError(
            "must be 0, for the most probable tokens, or between "
            f"{LEAST_TEMPERATURE:g} and {GREATEST_TEMPERATURE:g}"
        )
    return temperature


class OtherNames(tuple[str, ...]):
    """Another software's name for a setting, in its declaration."""


class InShell(NamedTuple):
    """The option of the shell, in a declaration, where that is not called as the setting is."""

    option: str


class Refusing(NamedTuple):
    """A check of the shell's text, in a declaration: UserError for a name of nothing that is here.

    It comes before anything is imported, and is not made of values from Python.
    """

    refuse: Callable[[str], None]


def called(*names: str) -> OtherNames:
    """The names of a setting in other software."""
    return OtherNames(names)


Integer = Annotated[int, BeforeValidator(plain), Field(strict=True)]
Number = Annotated[float, BeforeValidator(plain), Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
AtLeastOne = Annotated[Integer, Field(ge=1)]
NotNegative = Annotated[Integer, Field(ge=0)]

# Of configurations, whose numbers YAML may have as texts: it knows no `1e-4`.
Count = Annotated[int, Field(ge=1)]
FromZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

MaxNewTokens = Annotated[
    AtLeastOne,
    Field(description="Maximum number of new tokens per answer."),
    called("max_tokens", "max_completion_tokens", "max_output_tokens"),
]
Temperature = Annotated[
    Number,
    AfterValidator(in_float32),
    Field(description="Sampling temperature; 0 is greedy decoding."),
]
TopK = Annotated[
    Integer, Field(ge=0, description="Sample from the k most probable tokens; 0 uses all.")
]
# Rounded to 0 in float32 it would keep no token, and the kernel for GPUs would not end.
LEAST_TOP_P = 1e-30
TopP = Annotated[
    Number,
    Field(
        ge=LEAST_TOP_P,
        le=1,
        description="Sample from the most probable tokens with this total probability; 1 uses all.",
    ),
]
MinP = Annotated[Number, Field(ge=0, le=1)]
# A logit over or times it is finite in float32.
RepetitionPenalty = Annotated[
    Number, Field(ge=0.01, le=100, description="Penalty of tokens that were there; 1 is none.")
]
CountPenalty = Annotated[Number, Field(ge=-2, le=2)]  # OpenAI's and vLLM's range
Seed = Annotated[
    Integer,
    Field(
        description="Random seed. The same seed gives the same answer (with some rules only for "
        "the same tree size)."
    ),
]
BatchSize = Annotated[
    AtLeastOne,
    InShell("--batch-size"),
    Field(description="Number of prompts decoded together."),
]
TargetName = Annotated[
    str,
    Field(
        description="The model: a folder, a GGUF file, a hub id, or "
        "smollm2 after `drafthead fetch`."
    ),
]
DtypeName = Annotated[
    str,
    Field(
        description="Number type of the weights: auto, float32, bfloat16 or float16. auto is as "
        "stored: with our CPU kernels, a GGUF file stays in blocks of 4 to 8 bits. int8 and int4 "
        "multiply whole numbers, faster on a CPU; on a GPU they use bitsandbytes and are not "
        "compiled. Both change the text."
    ),
]
RULES = (
    "Acceptance rule. Exact: auto, greedy, match, rejection and traversal. Not exact, so the text "
    "changes: typical, lenient, and at temperature 0 top_k"
)
RuleName = Annotated[str, Field(description=f"{RULES}.")]
DeviceName = Annotated[str, Field(description="Device: auto, cpu or cuda.")]
CompileSwitch = Annotated[
    bool | None,
    Field(
        description="For GPUs: compile the model's layers, which takes minutes the first "
        "time. On a CPU it changes nothing. By default a GPU uses CUDA graphs and a CPU our "
        "kernels (bfloat16 on x86). --no-compile runs the model as it is written."
    ),
]
TemplateArguments = Annotated[
    dict[str, Any],
    BeforeValidator(template_values),
    InShell("--template-argument"),
    Field(
        description="Argument for the chat template, with a JSON value: enable_thinking=false. "
        "Repeatable. Rows that have their own arguments keep them."
    ),
]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[Class] | None = None, *, kw_only: bool = False) -> Any:
    """A frozen dataclass whose values are checked when it is made; UserError names a wrong one."""
    if cls is None:
        return partial(settings, kw_only=kw_only)
    made: Any = dataclass(cls, frozen=True, kw_only=kw_only, config=CONFIG)
    init = made.__init__

    @wraps(init)
    def checked_init(self: Any, *values: Any, **named: Any) -> None:
        with refusing(made):
            init(self, *values, **named)

    made.__init__ = checked_init
    return made


def read(cls: type[Class], given: Any) -> Class:
    """A dataclass of settings out of values by name; UserError for one that does not fit."""
    with refusing(cls):
        return reader(cls).validate_python(given)  # type: ignore[arg-type]


@cache
def reader(declared: Any) -> TypeAdapter[Any]:
    """The reader of values of a declaration, or of the settings of a class."""
    return TypeAdapter(declared, config=None if is_dataclass(declared) else CONFIG)


def checked(name: str, declared: Any, value: Any) -> Any:
    """A value as a declaration reads it; raises UserError, with the name, if it cannot."""
    try:
        return reader(declared).validate_python(value)
    except ValidationError as error:
        raise UserError(sentence(error, {name: declared})) from error


@contextmanager
def refusing(cls: Any) -> Iterator[None]:
    """Turns what pydantic finds wrong with settings of a class into a UserError."""
    try:
        yield
    except ValidationError as error:
        in_order = [each.name for each in fields(cls) if not each.kw_only]
        hints = get_type_hints(cls, include_extras=True)
        raise UserError(sentence(error, hints, in_order)) from error


def sentence(error: ValidationError, hints: dict[str, Any], in_order: Sequence[str] = ()) -> str:
    """The first complaint about settings, whose declarations are the hints by name.

    `in_order` are the settings whose values need no name.
    """
    first = error.errors(include_url=False)[0]
    kind, value, about = first["type"], first["input"], first.get("ctx", {})
    place = first["loc"][0] if first["loc"] else ""
    if isinstance(place, int) and place < len(in_order):
        place = in_order[place]  # a value without a name
    own = str(place) if place in hints else next(iter(hints))
    reason = str(about.get("error", "")) or first["msg"]
    if kind == "unexpected_keyword_argument":
        near = get_close_matches(str(place), hints, n=1)
        return f"unknown setting {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "missing":
        return f"{own} is missing, and has no default"
    if kind == "value_error" and not reason.startswith("must "):
        return reason  # a sentence already
    if kind in BOUNDS:
        (bound,) = about.values()
        return f"{own} must be {BOUNDS[kind]} {bound:.12g}, got {value}"
    if kind == "literal_error":
        return f"{own} must be {about['expected']}, got {value!r}"
    if kind == "value_error":
        return f"{own} {reason}, got {value!r}"
    if words := KINDS.get(kind.split("_")[0]):
        return f"{own} must be {words}, got {value!r} ({type(value).__name__})"
    return f"{own} is {value!r}: {reason}"


def declarations(hint: Any) -> Iterator[Any]:
    """The declarations of a type, at any depth: of `Annotated[int, Field(ge=1)] | None` the 1."""
    for part in get_args(hint):
        yield from part.metadata if isinstance(part, FieldInfo) else ()
        yield part
        yield from declarations(part)


def names_of(cls: Any) -> frozenset[str]:
    """The names of a class's settings."""
    return frozenset(each.name for each in fields(cls))


def help_of(hint: Any) -> str | None:
    """The description in a declaration; None where there is none."""
    found = [p.description for p in declarations(hint) if isinstance(p, FieldInfo)]
    return next((text for text in reversed(found) if text), None)


def names_elsewhere(cls: Any) -> dict[str, str]:
    """The settings of a class by their names in other software."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        other: each.name
        for each in fields(cls)
        for part in declarations(hints[each.name])
        if isinstance(part, OtherNames)
        for other in part
    }
