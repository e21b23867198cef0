"""The shape of the code base: layers, circles, long functions, names that would break launches."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from code_figures import (
    ROOT,
    Module,
    all_modules,
    import_circles,
    limited,
    reached_from,
    room_circles,
    unexplained_methods,
    upward_imports,
)

from drafthead.core.backend import BACKENDS
from drafthead.core.drafting.drafter import Drafter, DraftSession
from drafthead.core.errors import UserError
from drafthead.core.registry import PLUGINS
from drafthead.core.row_state import RowState
from drafthead.core.target.any_target import TARGETS

MODULES = all_modules()
FILES = [ROOT / module.path for module in MODULES]
PRIVATE = re.compile(r"torch\.(?:\w+\.)*_[^_]")
# No public function answers whether a profiler runs, or multiplies whole numbers without loss.
PRIVATE_ELSEWHERE = {
    "infer/engine/stats.py: torch.autograd._profiler_enabled",
    "core/target/int8.py: torch._int_mm",
}


def test_imports_point_down_the_layers() -> None:
    """So heads, engine and trainer know nothing of what compiles, measures or is seldom used."""
    assert not upward_imports(MODULES)


# Groups of entry points, by which upper layers register themselves.
GROUPS = {"drafthead.backends", "drafthead.targets"}
ABOVE = re.compile(r"\b(drafthead\.(?!core\b)|(backends|contrib|heads|infer|lab|serve|train)\.)\w")


def test_the_core_names_nothing_above_it() -> None:
    """In strings and docstrings neither."""
    strings = [
        node.value
        for module in MODULES
        if module.layer == "core"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert {string for string in strings if ABOVE.search(string)} == GROUPS | {PLUGINS}


def test_what_registers_itself_is_announced_by_the_installed_package() -> None:
    """After a change of these tables `pip install -e .` has to run again."""
    import tomllib

    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert tables.keys() == GROUPS
    for group, table in tables.items():
        found = importlib.metadata.entry_points(group=group)
        assert {point.name: point.value for point in found} == table
    for registry in (BACKENDS, TARGETS):
        assert all(map(registry.__getitem__, registry))
        with pytest.raises(UserError, match="no installed package announces 'x'"):
            registry["x"]


def test_every_module_that_is_imported_exists() -> None:
    """In functions too, where else nothing looks: mypy takes what it does not find for anything."""
    known = {"drafthead", *(module.name for module in MODULES)}
    ours = [(m.path, n) for m in MODULES for n in m.imports if n[0].startswith("drafthead.")]
    assert not [f"{path} imports {names[-1]}" for path, names in ours if not known & {*names}]


def test_no_modules_import_each_other() -> None:
    """Not within functions or for type checking either."""
    assert not import_circles(MODULES)


@pytest.mark.parametrize(
    "imports",
    [
        {"a": "from drafthead.heads import b", "b": "from drafthead.heads.a import x"},
        {"a": "import drafthead.heads.b", "b": "def f():\n    from drafthead.heads.a import x"},
        {
            "a": "from drafthead.heads.b import x",
            "b": "if TYPE_CHECKING:\n    import drafthead.heads.c",
            "c": "from drafthead.heads import a",
        },
    ],
)
def test_circles_are_found(imports: dict[str, str]) -> None:
    modules = [Module(Path(f"heads/{name}.py"), text) for name, text in imports.items()]
    alone = Module(Path("heads/alone.py"), "from drafthead.heads import a")
    assert import_circles([*modules, alone]) == [[f"drafthead.heads.{name}" for name in imports]]
    assert not import_circles(modules[1:])


# What no step reads: how models are found and loaded, what options say, what becomes of answers.
NOT_FOR_STEPS = re.compile(
    r"heads/(storage|growing|families|formats|layers|objectives)/|core/target/(loading|gguf|adapt)|"
    r"infer/(answers|beams|drafters|loading|scheduling|timing)/|"
    r"infer/request/(?!request|stopping)|infer/\w+\.py"
)


def test_the_loop_imports_only_what_its_steps_need() -> None:
    """Records, processors and what was read before come with the request, or by name."""
    reached = [str(m.path) for m in reached_from(MODULES, "drafthead.infer.engine.loop")]
    assert "infer/engine/step.py" in reached
    assert not list(filter(NOT_FOR_STEPS.match, reached))


# What a figure may be at most. The house is still larger than it should be: a figure that falls
# takes its limit with it.
LIMITS = {
    "lines of core": 8953,
    "lines of heads": 10218,
    "lines of backends": 4393,
    "lines of infer": 10351,
    "lines of contrib": 1201,
    "lines of train": 7617,
    "lines of lab": 6772,
    "lines of serve": 3676,
    "lines of scripts": 2971,
    "lines of C++": 4000,
    "chain of imports": 23,
    "class names in several files": 8,
    "docstrings that are a clause": 0,
    "imports within functions": 115,
    "names that lab takes from below": 178,  # beside those of `drafthead.infer`
    "% of tensor functions without shape": 5.0,
}


def test_no_figure_of_the_code_slides() -> None:
    found = limited(MODULES)
    assert found.keys() == LIMITS.keys()
    assert not {name: value for name, value in found.items() if value > LIMITS[name]}


# Rooms that still import each other.
ROOM_CIRCLES = []


def test_no_rooms_import_each_other() -> None:
    """So each folder can be read after those that it builds on."""
    assert room_circles(MODULES) == ROOM_CIRCLES


def test_circles_of_rooms_are_found() -> None:
    texts = {
        "train/a/x": "from drafthead.train.b import y",
        "train/b/y": "",
        "train/b/z": "from drafthead.train import c\nfrom drafthead.train.a import x",
        "train/c": "from drafthead.train.b import z",
    }
    modules = [Module(Path(f"{name}.py"), text) for name, text in texts.items()]
    assert room_circles(modules) == [["train/a", "train/b"]]
    assert not room_circles(modules[:2])


# A docstring names its noun, so that it can be read without the one before it.
PRONOUNS = re.compile(
    r"The same\b|(?:.*[.:;] )?(?:(?:That|Those) of\b|As for\b|The same (?:as|for|in|of|with)\b)"
)


def test_a_drafter_and_its_session_have_thirteen_members() -> None:
    """What the engine asks of whatever proposes tokens; `row_state` says what a row's state is,
    `wanted` which of the `names` of a drafter's parts each row asks for, and `forms` what each
    row's answer has to keep to.
    """
    members = {
        name
        for part in (Drafter, DraftSession, RowState)
        for name in (*vars(part), *part.__annotations__)
        if not name.startswith("_")
    }
    session = {"propose", "commit", "keep_rows", "join_rows", "cut"}
    assert members - {"row_state"} == {
        *("features", "names", "budgets", "sampling_rule", "compile", "start", "wanted"),
        *("forms", *session),
    }


def test_docstrings_name_their_nouns() -> None:
    """Each of their sentences, in the package, in its tests and in its benchmarks."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    tested = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    texts = [
        (path, " ".join((ast.get_docstring(node) or "").split()))
        for path in (*FILES, *tested)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented)
    ]
    assert not [f"{path}: {text}" for path, text in texts if PRONOUNS.match(text)]
    assert PRONOUNS.match("The window. Those of a shard are some.")


def test_every_public_method_is_explained() -> None:
    """By its docstring, or by that of the method of ours that it overrides; ruff asks the rest."""
    benchmarks = all_modules(layers=("benchmarks",))
    assert not list(map(str, unexplained_methods([*MODULES, *benchmarks])))


def test_methods_that_override_none_of_ours_need_a_docstring() -> None:
    base = (
        'class Base(Generic[T]):\n    def f(self):\n        """F."""\n'
        "    def g(self): ...\n    def _h(self): ..."
    )
    texts = {
        "heads/a": base,
        "heads/b": "from drafthead.heads.a import Base as B",
        "heads/c": "from drafthead.heads.b import B\nclass C(B[int]):\n    x = 0",
        "heads/d": "from drafthead.heads import c\nfrom drafthead.heads.c import C\n"
        "class D(C):\n    def f(self): ...\n    def g(self): ...\n"
        "class E(Module):\n    def f(self): ...\n",
    }
    modules = [Module(Path(f"{name}.py"), text) for name, text in texts.items()]
    found = [f"{f.owner}{f.node.name}" for f in unexplained_methods(modules)]
    assert found == ["Base.g", "D.g", "E.f"]


def test_functions_fit_a_screen() -> None:
    """Sixty lines at most; the options of a command are not counted."""
    functions = [function for module in MODULES for function in module.functions]
    lines = {
        str(f): f.body_lines if (f.module.layer, f.node.name) == ("scripts", "main") else f.lines
        for f in functions
    }
    assert not {place: count for place, count in lines.items() if count > 60}


def dotted_names(module: Module) -> Iterator[str]:
    """Everything that is imported, and attributes of names: "torch._C" of `torch._C.x`."""
    yield from (names[0] for names in module.imports)
    yield from (ast.unparse(n) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute))


def test_only_backends_use_private_names_of_torch() -> None:
    """They may change with any release, so they are in one folder, which checks that they work."""
    used = {(m.path, name) for m in MODULES for name in dotted_names(m) if PRIVATE.match(name)}
    elsewhere = {f"{p}: {n}" for p, n in used if not p.is_relative_to("backends")}
    assert elsewhere == PRIVATE_ELSEWHERE


@cache
def importable_names() -> set[str]:
    """Modules of the standard library and of everything that is installed beside drafthead."""
    installed = set(importlib.metadata.packages_distributions()) - {"drafthead"}
    return {name.replace("-", "_").lower() for name in installed} | set(sys.stdlib_module_names)


def test_no_file_shadows_a_module_when_it_is_launched_by_path() -> None:
    """`python train/x.py` puts train/ first on the path: train/datasets.py would hide datasets."""
    hiding = {path for path in FILES if path.stem in importable_names()}
    assert not {path for path in hiding if path.stem != "__init__"}


def test_every_package_is_listed_for_installation() -> None:
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT) for p in FILES if p.name == "__init__.py"}
    expected = {"drafthead." + ".".join(folder.parts) for folder in folders}
    assert set(setup["packages"]) == expected | {
        "drafthead",
        "drafthead.assets",
        "drafthead.configs",
    }


def test_every_file_that_code_reads_is_installed_with_its_package() -> None:
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    layers = {path.relative_to(ROOT).parts[0] for path in FILES} | {"configs"}
    kinds = (".cpp", ".h", ".html", ".json", ".yaml")
    read = {path for layer in layers for path in (ROOT / layer).rglob("*") if path.suffix in kinds}
    installed = {
        path
        for package, patterns in setup["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
        if package != "*"
    }
    assert read and not read - installed


def test_constraints_pin_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.match(r"[\w-]+", entry)[0].lower().replace("_", "-") for entry in wanted}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert not names - pinned


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_yaml_mappings(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)
