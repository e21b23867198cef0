"""Prints every module with the first sentence of its docstring: `make layout`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from code_figures import LAYERS

ROOT = Path(__file__).resolve().parent.parent
# A sentence ends at a full stop, unless the stop belongs to "et al." or the like.
SENTENCE_END = re.compile(r"(?<!\bal)(?<!\be\.g)(?<!\bi\.e)[.?!](?=\s)")


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring on one line, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    end = SENTENCE_END.search(paragraph)
    return (paragraph[: end.end()] if end else paragraph).rstrip(".:")


def about_folder(folder: Path) -> str:
    """A folder's sentence, from its `__init__.py`, without the package name in front of it."""
    package = ".".join(["drafthead", *folder.relative_to(ROOT).parts])
    sentence = first_sentence(folder / "__init__.py").removeprefix(f"{package}: ")
    return sentence[:1].upper() + sentence[1:]


def lines_of(folder: Path, indent: str = "") -> Iterator[str]:
    """The modules of a folder as a Markdown list, then the packages in it, each with its own."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}- {path.name}: {first_sentence(path)}"
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield f"{indent}- **{package.name}/**: {about_folder(package)}"
        yield from lines_of(package, indent + "  ")


def layout() -> str:
    """All layers, the uppermost first."""
    sections = [
        "\n".join([f"## {layer}/", f"{about_folder(ROOT / layer)}.\n", *lines_of(ROOT / layer)])
        for layer in reversed(LAYERS)
    ]
    return "\n\n".join(sections)


if __name__ == "__main__":
    print(layout())
