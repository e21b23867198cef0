"""Types and bounds of the configuration of every head family, in whatever format it came."""

from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import ConfigDict, Field, create_model

from drafthead.heads.formats.keys import MOST_PARTS, MOST_SIZE, MOST_TOKENS, Keys, LayerId
from drafthead.heads.formats.rope import known_rope

# Fields of the families' configurations; a size of 0 is filled in from the target.
LIMITS = {
    "num_attention_heads": (0, 2**14),
    "num_key_value_heads": (0, 2**14),
    "head_dim": (0, 2**16),
    "vocab_size": (0, MOST_TOKENS),
    "draft_vocab_size": (0, MOST_TOKENS),
    "mask_token": (0, MOST_TOKENS),
    "max_position_embeddings": (0, 2**31),
    "rms_norm_eps": (0, 1),
    "block_size": (1, 256),
    "depth": (1, MOST_PARTS),
    "ttt_steps": (1, MOST_PARTS),
}


def limits(name: str) -> tuple[int, int]:
    """The least and the largest number that the field `name` may be."""
    return LIMITS.get(name, (0, MOST_PARTS if name.startswith("num_") else MOST_SIZE))


def bounded(name: str, kind: Any) -> Any:
    """The type `kind` of the field `name`, with bounds if it is a number."""
    least, most = limits(name)
    if kind in (int, float):
        return Annotated[kind, Field(ge=least, le=most)]
    if set(get_args(kind)) == {int, type(None)}:
        return Annotated[int, Field(ge=least, le=most)] | None
    return tuple[LayerId, ...] if kind == tuple[int, ...] else kind


@cache
def keys_of(config_class: type) -> type[Keys]:
    """The keys of a head's configuration: the fields of its class and nothing else."""
    kinds = get_type_hints(config_class)
    declared: dict[str, Any] = {}
    for field in fields(config_class):
        required = field.default is MISSING and field.default_factory is MISSING
        # What is left out gets its default from the class itself.
        declared[field.name] = (bounded(field.name, kinds[field.name]), ... if required else None)
    return create_model(config_class.__name__, __base__=HeadKeys, **declared)


class HeadKeys(Keys):
    """The keys of a head's configuration; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")
    knows_null = True


def read_head_config(config_class: type, content: dict[str, Any], file: Path) -> Any:
    """An instance of a family's configuration class from an object in `file`.

    Raises UserError naming what is unknown, of the wrong type or out of bounds, and ValueError for
    what the class itself refuses.
    """
    keys = keys_of(config_class).of(content, file, "head")
    values = {name: getattr(keys, name) for name in content}
    if values.get("rope_parameters") is not None:
        rope, head_dim = values["rope_parameters"], values.get("head_dim", 0)
        values["rope_parameters"] = known_rope(rope, head_dim, file, "head.rope_parameters")
    return config_class(**values)


def check_head_config(config: Any, file: Path) -> None:
    """Raise UserError when a configuration that a reader made is out of bounds."""
    read_head_config(type(config), asdict(config), file)
