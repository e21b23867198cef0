"""The shape of the code base: which layer may import which, and names that would break launches."""

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LAYERS = ["heads", "infer", "train", "scripts"]  # an import may point to the left, never right
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_the_layers(path: Path) -> None:
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    for name in imported_modules(path):
        if name.startswith("drafthead."):
            assert LAYERS.index(name.split(".")[1]) <= layer, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_shadows_a_module_when_it_is_launched_by_path(path: Path) -> None:
    """`python train/x.py` puts train/ first on the path: train/datasets.py would hide datasets."""
    installed = {
        name.replace("-", "_").lower()
        for name in importlib.metadata.packages_distributions()
        if name != "drafthead"
    }
    assert path.stem == "__init__" or path.stem not in installed | set(sys.stdlib_module_names)


def test_every_package_is_listed_for_installation() -> None:
    import tomllib

    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(ROOT) for p in FILES if p.name == "__init__.py"}
    expected = {"drafthead." + ".".join(folder.parts) for folder in folders}
    assert set(setup["packages"]) == expected | {"drafthead.configs"}


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
