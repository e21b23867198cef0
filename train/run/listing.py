"""All settings of a training run: defaults, what they may be, and their comments as help."""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from textwrap import dedent
from typing import Any, get_type_hints

from drafthead.core.settings import reader
from drafthead.train.run.config import SECTIONS

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
KINDS = {"object": "mapping", "array": "list", "string": "text", "boolean": "true or false"}


@dataclass(frozen=True)
class Listed:
    """A setting as a list of them shows it."""

    name: str  # section.key
    default: str  # as YAML has it
    values: str
    help: str


def table() -> str:
    """The settings of all sections but the head's, as the table in docs/training.md."""
    rows = ["|setting|default|values||", "|-|-|-|-|"]
    for section, cls in SECTIONS.items():
        rows += [
            f"|`{each.name}`|`{each.default}`|{each.values}|{each.help}|"
            for each in listed_in(section, cls)
        ]
    return "\n".join(rows) + "\n"


def listed(family: str) -> Iterator[Listed]:
    """The settings of a run that trains a head of a family; UserError for one that is not known."""
    from drafthead.train.run.trainables import trainable

    yield from listed_in("head", trainable(family).config_class)
    for section, cls in SECTIONS.items():
        yield from listed_in(section, cls)


def listed_in(section: str, cls: type) -> Iterator[Listed]:
    """The settings of a section."""
    hints, helps = get_type_hints(cls, include_extras=True), comments_of(cls)
    for each in fields(cls):
        made = each.default_factory() if each.default_factory is not MISSING else each.default
        default = "required" if made is MISSING else json.dumps(made)
        values = values_of(reader(hints[each.name]).json_schema())
        yield Listed(f"{section}.{each.name}", default, values, helps.get(each.name, ""))


def values_of(schema: dict[str, Any]) -> str:
    """The values that a setting takes, by its JSON schema: `integer ≥1`."""
    if "anyOf" in schema:
        return " or ".join(map(values_of, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    kind = str(schema.get("type", "any"))
    bounds = [f"{sign}{schema[name]:g}" for name, sign in BOUNDS.items() if name in schema]
    return " ".join([KINDS.get(kind, kind), *bounds])


def comments_of(cls: type) -> dict[str, str]:
    """The comments above the fields of a class and beside them, those of its bases included."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        source = dedent(inspect.getsource(each))
        lines = source.splitlines()
        [made] = ast.parse(source).body
        assert isinstance(made, ast.ClassDef)
        for node in made.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                first = last = node.lineno - 1
                while lines[first - 1].lstrip().startswith("# "):
                    first -= 1
                above = [line.strip(" #") for line in lines[first:last]]
                beside = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
                found[node.target.id] = " ".join([*above, beside]).strip()
    return found
