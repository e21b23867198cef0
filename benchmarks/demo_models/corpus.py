"""Question-and-answer pairs cut from Python sources that every installation has.

A pair is one documented function: the question is its signature and docstring, the answer is the
function without the docstring. Sources are the standard library and this project's own
dependencies, so the demo models can be rebuilt anywhere from the same package versions.
"""

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]

# Import name -> distribution name, in the order in which they are read.
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "peft": "peft",
    "datasets": "datasets",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "scipy": "scipy",
    "pandas": "pandas",
    "matplotlib": "matplotlib",
    "sympy": "sympy",
    "networkx": "networkx",
    "mpmath": "mpmath",
    "fsspec": "fsspec",
    "jinja2": "jinja2",
    "rich": "rich",
    "pydantic": "pydantic",
    "werkzeug": "Werkzeug",
    "fontTools": "fonttools",
    "PIL": "pillow",
}
SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "site-packages", "lib2to3", "turtledemo"}
MAX_QUESTION_CHARS = 640
MAX_ANSWER_CHARS = 1000
MIN_BODY_CHARS = 20
# A held-out answer with more than this share of its lines in training files counts as a copy.
MAX_SEEN_LINE_SHARE = 0.5
MIN_TELLING_LINE_CHARS = 16


@dataclass(frozen=True)
class Pair:
    """One documented function, cut into a question and its answer."""

    source: str  # "package/relative/path.py:line"
    split: Split
    question: str
    answer: str


def package_versions() -> dict[str, str]:
    """Versions of the packages that the corpus is read from, for the model card."""
    return {name: version(name) for name in PACKAGES.values()}


def split_of(source_file: str) -> Split:
    """The split of a file: 4 % validation, 4 % test, by a hash of its name, the same everywhere."""
    bucket = int(hashlib.sha256(source_file.encode()).hexdigest(), 16) % 100
    if bucket < 4:
        return "test"
    return "validation" if bucket < 8 else "train"


def source_files() -> Iterator[tuple[str, Path]]:
    """Every source file of the corpus as (stable name, path), in a fixed order."""
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    installed = Path(sysconfig.get_paths()["purelib"])
    roots = [("stdlib", standard_library), *((name, installed / name) for name in PACKAGES)]
    for name, root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.isdisjoint(relative.parts):
                yield f"{name}/{relative.as_posix()}", path


def cut_function(node: ast.FunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Cut a documented function into (question, answer); None when it makes no good pair.

    The docstring is the first statement of the body, so for::

        def double(x):          # lines[lineno - 1]
            '''Twice x.'''      # body[0]
            return 2 * x        # body[1] .. end_lineno

    the question is the first two lines and the answer the first and the third, dedented.
    """
    if ast.get_docstring(node) is None or len(node.body) < 2 or node.decorator_list:
        return None
    docstring, first = node.body[0], node.body[1]
    if docstring.end_lineno is None or node.end_lineno is None or docstring.lineno == node.lineno:
        return None
    signature = lines[node.lineno - 1 : docstring.lineno - 1]
    documented = lines[node.lineno - 1 : docstring.end_lineno]
    body = lines[first.lineno - 1 : node.end_lineno]
    if len("".join(body).strip()) < MIN_BODY_CHARS:
        return None
    question = textwrap.dedent("\n".join(documented)).strip()
    answer = textwrap.dedent("\n".join(signature + body)).strip()
    if len(question) > MAX_QUESTION_CHARS or len(answer) > MAX_ANSWER_CHARS:
        return None
    return question, answer


def pairs_in_file(name: str, path: Path) -> Iterator[Pair]:
    """The pairs of one file; nothing when the file is not UTF-8 or does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings in these sources
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (cut := cut_function(node, lines)):
            yield Pair(f"{name}:{node.lineno}", split_of(name), *cut)


def telling_lines(answer: str) -> list[str]:
    """The lines of an answer that are long enough to show that it was copied."""
    stripped = (line.strip() for line in answer.splitlines())
    return [line for line in stripped if len(line) >= MIN_TELLING_LINE_CHARS]


def read_corpus() -> list[Pair]:
    """All pairs, without repeated answers and without held-out pairs that training files contain.

    Files of one project copy from each other, so a held-out pair is dropped when more than half of
    its telling lines are in training answers.
    """
    pairs = [pair for name, path in source_files() for pair in pairs_in_file(name, path)]
    pairs.sort(key=lambda pair: pair.split != "train")  # stable: training files first
    distinct: list[Pair] = []
    seen_answers: set[str] = set()
    seen_lines: set[str] = set()
    for pair in pairs:
        lines = telling_lines(pair.answer)
        copied = sum(line in seen_lines for line in lines) > MAX_SEEN_LINE_SHARE * len(lines)
        if pair.answer in seen_answers or (pair.split != "train" and copied):
            continue
        seen_answers.add(pair.answer)
        if pair.split == "train":
            seen_lines.update(lines)
        distinct.append(pair)
    return distinct
