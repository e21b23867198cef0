"""The one reader of configurations: which keys there are, of which type, within which bounds.

**Every key is accounted for.** A key that nobody reads may change what a head computes, and then it
drafts badly without any error. So a key is either a field of a class that inherits `Keys`, which is
read, or in the class's `neutral` with the reason why it changes nothing; all others are refused by
name when the head has been read, see `Account`. A field whose value decides something that our
heads do not have is declared with `only`.

A class that inherits `Keys` declares them as fields, and `of` reads them:

>>> class Shape(Keys):
...     hidden_size: Size
...     bias: bool = False
>>> Shape.of({"hidden_size": 64}, Path("config.json"))
Shape(hidden_size=64, bias=False)
>>> Shape.of({"hidden_size": "64"}, Path("config.json"))
Traceback (most recent call last):
drafthead.core.errors.UserError: config.json: hidden_size is '64', but must be a valid integer
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from drafthead.core.errors import UserError
from drafthead.core.printing import shown

# Larger numbers would be a mistake, and might take memory or time without end.
MOST_PARTS = 128  # heads, layers, blocks or steps of a head
MOST_SIZE, MOST_TOKENS = 2**24, 2**20  # a dimension; a vocabulary
Parts = Annotated[int, Field(ge=1, le=MOST_PARTS)]
Size = Annotated[int, Field(ge=1, le=MOST_SIZE)]
Vocabulary = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Token = Annotated[int, Field(ge=0, lt=MOST_TOKENS)]
Slots = Annotated[int, Field(ge=1, le=256)]  # of a block: each attends to every other
Count = Annotated[int, Field(ge=0, le=2**31)]
LayerId = Annotated[int, Field(ge=-1, le=2**10)]
LayerIds = Annotated[list[LayerId], Field(fail_fast=True)]
TargetLayers = Annotated[int, Field(ge=1, le=2**10)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
Place = tuple[str, ...]  # the keys that lead to an object in a configuration; () is the whole
Reasons = Mapping[str, str]  # why keys change nothing, and their names with spaces between them

# Keys that any configuration may have and that change nothing: why, and their names.
WRITTEN = {
    "how the file was written; what the head is, its tensors show": (
        "_name_or_path _attn_implementation(_autoset)? architectures auto_map custom_generate "
        "(torch_)?dtype transformers_version"
    ),
    "of training": "initializer_range attention_dropout hidden_dropout",
    "of generation, where the target decides": (
        "(bos|eos|pad|sep|decoder_start|forced_bos|forced_eos)_token_id use_cache do_sample "
        "temperature top_k top_p typical_p (max|min)_length early_stopping num_beams "
        "num_beam_groups diversity_penalty repetition_penalty length_penalty bad_words_ids "
        "(encoder_)?no_repeat_ngram_size num_return_sequences (begin_)?suppress_tokens "
        "remove_invalid_values exponential_decay_length_penalty"
    ),
    "of transformers, for other kinds of model": (
        "return_dict(_in_generate)? output_(attentions|hidden_states|scores) torchscript "
        "use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward is_(encoder_)?decoder "
        "add_cross_attention cross_attention_hidden_size tie_encoder_decoder id2label label2id "
        "finetuning_task problem_type prefix task_specific_params tokenizer_class"
    ),
}


def only(*allowed: Any, why: str) -> AfterValidator:
    """Of a key, accept these values alone; `why` completes "KEY is VALUE: " for all others."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise PydanticCustomError("refused", "{why}", {"why": why})
        return value

    return AfterValidator(check)


class Keys(BaseModel):
    """Keys of a JSON object; null is as good as missing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)
    knows_null: ClassVar[bool] = False  # whether null is a value of its own
    # Keys that are not read because they change nothing; names are regular expressions.
    neutral: ClassVar[Reasons] = {}
    _file: Path = PrivateAttr(default=Path())

    @classmethod
    def of(cls, content: Mapping[str, Any], file: Path, within: str = "") -> Self:
        """The keys in `content`, which comes from `file`, there perhaps in the object `within`.

        Raises UserError naming the file, the key, its value and what it must be.
        """
        try:
            read = content
            if cls.model_config["extra"] == "ignore":  # what is not read is not copied either
                read = {key: content[key] for key in cls.model_fields if key in content}
            given = read if cls.knows_null else without_nulls(read)
            # Validated as JSON, in which a list is as good as a tuple.
            found = cls.model_validate_json(json.dumps(given))
        except (ValidationError, RecursionError) as error:
            raise UserError(f"{file}: {complaint(error, within)}") from error
        found._file = file
        return found

    def check(self, **found: int | None) -> None:
        """Raise UserError when keys state other sizes than the tensors have."""
        for key, size in found.items():
            claimed = getattr(self, key)
            if claimed not in (None, size):
                raise UserError(f"{self._file} says {key} {claimed}, but the tensors have {size}")


class ModelKeys(Keys):
    """The configuration of a model of transformers, whose own class reads it."""

    neutral: ClassVar[Reasons] = {"read by the model's own class": ".*"}


class Account:
    """The account of a configuration: what became of each of its keys.

    Several classes may read one object; what none of them knows is refused.
    """

    def __init__(self) -> None:
        self.read: dict[Place, set[str]] = {}
        self.neutral: dict[Place, list[str]] = {}

    def add(self, declared: type[Keys], place: Place = ()) -> None:
        """Note that `declared` reads the object at `place`, and all objects in its fields."""
        self.read.setdefault(place, set()).update(declared.model_fields)
        self.neutral.setdefault(place, []).extend(" ".join(declared.neutral.values()).split())
        for name, field in declared.model_fields.items():
            for inner in objects_in(field.annotation):
                self.add(inner, (*place, name))

    def unknown(self, content: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[str, Any]]:
        """Every key below `place` that is neither read nor neutral, and its value.

        An object counts as read if something read the object itself.
        """
        read, neutral = self.read.get(place, set()), self.neutral.get(place, [])
        for key, value in content.items():
            inside = (*place, key)
            if value is None or any(re.fullmatch(pattern, key) for pattern in neutral):
                continue
            objects = [item for item in listed(value) if isinstance(item, dict)]
            if key not in read or (objects and inside not in self.read):
                yield ".".join(inside), value
                continue
            for item in objects:
                yield from self.unknown(item, inside)

    def refuse_unknown(self, content: Mapping[str, Any], file: Path, name: str) -> None:
        """Raise UserError for keys that a reader of the format called `name` does not know."""
        unknown = list(self.unknown(content))
        if not unknown:
            return
        key, value = unknown[0]
        others = ", ".join(key for key, _ in unknown[1:])
        raise UserError(
            f"{file}: {key} is {shown(value)}, but what this key changes in a head of the format "
            f"{name} is not known here"
            + (f", nor are {others}" if others else "")
            + "; if the head computes the same without it, delete it from the file"
        )


def listed(value: Any) -> list[Any]:
    """A list itself, of anything else a list of it alone."""
    return value if isinstance(value, list) else [value]


def objects_in(annotation: Any) -> Iterator[type[Keys]]:
    """The classes of keys in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, Keys):
        yield annotation
    for part in get_args(annotation):
        yield from objects_in(part)


def without_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object, and the objects in it, without keys whose value is null."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value is not None
    }


def complaint(error: ValidationError | RecursionError, within: str) -> str:
    """The first problem, in words."""
    if isinstance(error, RecursionError):
        return "objects are nested too deeply"
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, [within, *first["loc"]] if within else first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            return f"{key} is not known"
        case "refused":
            return f"{key} is {shown(first['input'])}: {reason}"
        case "value_error" | "json_invalid":
            return reason
    wanted = reason.removeprefix("Input should be ").removeprefix("Input should ")
    return f"{key} is {shown(first['input'])}, but must be {wanted}"


@dataclass(frozen=True)
class Renaming:
    """Beginnings of the names of tensors in a file, and ours: one table, read both ways.

    Of several that fit the first counts; an empty one fits all.
    """

    table: Mapping[str, str]  # ours by theirs

    def ours(self, name: str) -> str:
        """Our name of a tensor; one that nothing fits stays."""
        return renamed(name, self.table.items())

    def theirs(self, name: str) -> str:
        """Their name of one of our tensors."""
        return renamed(name, ((ours, theirs) for theirs, ours in self.table.items()))

    def written(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors [...] of our head under their names."""
        return {self.theirs(name): tensor for name, tensor in tensors.items()}


def renamed(name: str, beginnings: Iterable[tuple[str, str]]) -> str:
    """The name with the first beginning that it has in place of the other one of the pair."""
    for old, new in beginnings:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def our_taps(ids: list[int], num_target_layers: int) -> tuple[int, ...]:
    """Our layers for ids that are read as `hidden_states[id + 1]`: for 4 layers 0 3 are 0 4."""
    return tuple(num_target_layers if i == num_target_layers - 1 else i for i in ids)
