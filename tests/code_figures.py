"""Figures of the code, counted from its syntax trees: `python tests/code_figures.py [ROOT]`."""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
# A layer -> the layers that it may import beside itself. What decodes and trains (core, heads,
# infer, train) never imports backends, contrib or lab: they are found by name.
MAY_IMPORT = {
    "core": set[str](),
    "heads": {"core"},
    "backends": {"core", "heads"},
    "infer": {"core", "heads"},
    "contrib": {"core", "heads", "infer"},
    "train": {"core", "heads", "infer"},
    "lab": {"core", "heads", "backends", "infer", "contrib", "train"},
    "serve": {"core", "heads", "infer"},
    "scripts": {"core", "heads", "backends", "infer", "contrib", "train", "lab", "serve"},
}
LAYERS = list(MAY_IMPORT)
# What one step of decoding needs: trees, drafting, cache, sampling, target, engine, rules, request.
ONE_STEP = (
    "core/trees/",
    "core/drafting/",
    "core/kv_cache/",
    "core/sampling.py",
    "core/coupling.py",
    "core/target/target.py",
    "core/target/tree_cache.py",
    "core/backend.py",
    "infer/engine/",
    "infer/verifiers/",
    "infer/decoder.py",
    "infer/request/request.py",
)
# "[B, N, D]", "[V]", "[]"; not `tree[node]` or `list[int]`, where a word comes before the bracket.
SHAPE = re.compile(r"(?<![\w\])])\[([\w.,+*/() -]*[A-Za-z.][\w.,+*/() -]*)?\]")
TENSOR = re.compile(r"\bTensors?\b")  # not `TensorFile`
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function or method, and what it is in."""

    module: "Module"
    node: FUNCTION
    owner: str  # "Class." or "function.<locals>."; empty at the top of a module

    def __str__(self) -> str:
        return f"{self.module.path}:{self.node.lineno} {self.owner}{self.node.name}"

    @property
    def owners(self) -> list[str]:
        """The names of the classes that it is in, and of functions with "<locals>"."""
        return self.owner.split(".")[:-1]

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or 0) - self.node.lineno + 1

    @property
    def body_lines(self) -> int:
        """Lines without the signature."""
        return (self.node.end_lineno or 0) - self.node.body[0].lineno + 1

    @property
    def public(self) -> bool:
        return "<locals>" not in self.owner and not self.node.name.startswith("_")

    @property
    def arguments(self) -> list[ast.arg]:
        """All arguments but `self` and `cls`."""
        nodes = ast.iter_child_nodes(self.node.args)
        return [n for n in nodes if isinstance(n, ast.arg) and n.arg not in ("self", "cls")]

    @property
    def takes_tensors(self) -> bool:
        hints = [*(argument.annotation for argument in self.arguments), self.node.returns]
        return any(TENSOR.search(ast.unparse(hint)) for hint in hints if hint)

    @property
    def states_shape(self) -> bool:
        """Whether the docstring or a comment in the signature holds a shape in square brackets."""
        signature = self.module.lines[self.node.lineno - 1 : self.node.body[0].lineno - 1]
        comments = [line.partition("#")[2] for line in signature]
        return bool(SHAPE.search("\n".join([ast.get_docstring(self.node) or "", *comments])))


class Module:
    """A file of Python; its path is relative to the repository."""

    def __init__(self, path: Path, text: str):
        self.path, self.layer = path, path.parts[0]
        self.lines, self.tree = text.splitlines(), ast.parse(text)
        parts = path.with_suffix("").parts
        self.name = ".".join(["drafthead", *(parts[:-1] if path.stem == "__init__" else parts)])
        self.room = "/".join(parts[:2]) if len(parts) > 2 else ""  # "core/trees"

    @cached_property
    def imports(self) -> list[tuple[str, ...]]:
        """Names of what is imported, in functions and for type checking too; see `imported`."""
        names: list[tuple[str, ...]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names += [(alias.name,) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        return names

    def imported(self, modules: set[str]) -> set[str]:
        """Which of the modules are imported: of `from a import b` it is a.b, or else a."""
        return {next((n for n in names if n in modules), self.name) for names in self.imports}

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    @cached_property
    def origins(self) -> dict[str, tuple[str, str]]:
        """Module and name there of what is imported by name."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        return {a.asname or a.name: (n.module or "", a.name) for n in nodes for a in n.names}

    @cached_property
    def functions(self) -> list[Function]:
        return list(self._functions(self.tree, ""))

    def _functions(self, node: ast.AST, owner: str) -> Iterable[Function]:
        for child in ast.iter_child_nodes(node):
            inner = owner
            if isinstance(child, FUNCTION):
                yield Function(self, child, owner)
                inner = f"{owner}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{owner}{child.name}."
            yield from self._functions(child, inner)

    @property
    def docstring_lines(self) -> int:
        nodes = [
            n for n in ast.walk(self.tree) if isinstance(n, ast.Module | ast.ClassDef | FUNCTION)
        ]
        first = [node.body[0] for node in nodes if ast.get_docstring(node)]
        return sum((text.end_lineno or 0) - text.lineno + 1 for text in first)


def all_modules(root: Path = ROOT, layers: Iterable[str] = LAYERS) -> list[Module]:
    """Every file of the layers."""
    paths = [path for layer in layers for path in sorted((root / layer).rglob("*.py"))]
    return [Module(path.relative_to(root), path.read_text()) for path in paths]


def upward_imports(modules: list[Module]) -> list[str]:
    """Imports of a layer by one that must not know it: "heads/a.py imports drafthead.infer.b"."""
    return [
        f"{module.path} imports {names[-1]}"
        for module in modules
        for names in module.imports
        if names[0].startswith("drafthead.")
        and (layer := names[0].split(".")[1]) in MAY_IMPORT
        and layer not in MAY_IMPORT[module.layer] | {module.layer}
    ]


def import_circles(modules: list[Module]) -> list[list[str]]:
    """Names of modules that import each other, directly or through others: [["a", "b"], ...]."""
    names = {module.name for module in modules}
    return circles({module.name: module.imported(names) for module in modules})


def room_circles(modules: list[Module]) -> list[list[str]]:
    """Names of rooms, the folders in a layer, that import each other; a room holds modules."""
    names = {module.name for module in modules}
    rooms = {module.name: module.room for module in modules if module.room}
    reached: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module in modules:
        if module.room:
            reached[module.room] |= {rooms[n] for n in module.imported(names) if n in rooms}
    return circles(reached)


def circles(reached: dict[str, set[str]]) -> list[list[str]]:
    """Which names reach each other, by one step each or by several: [["a", "b"], ...]."""
    reached = {name: others | {name} for name, others in reached.items()}
    for middle in reached:  # Warshall: paths through one more name
        for name in reached:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    found = {tuple(sorted(m for m in reached[n] if n in reached[m])) for n in reached}
    return sorted(list(circle) for circle in found if len(circle) > 1)


def reached_from(modules: list[Module], name: str) -> list[Module]:
    """The module of that name and all that it imports, directly or through others."""
    by_name = {module.name: module for module in modules}
    found: dict[str, Module] = {}
    todo = [name]
    while todo:
        if (name := todo.pop()) not in found:
            found[name] = by_name[name]
            todo += by_name[name].imported(set(by_name))
    return list(found.values())


def longest_chain(modules: list[Module]) -> list[str]:
    """The names of modules of which each imports the next, as many as there are in a row."""
    names = {module.name for module in modules}
    imported = {module.name: module.imported(names) - {module.name} for module in modules}

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, imported[name]), key=len, default=()))

    return list(max(map(chain, imported), key=len))


def small_files(modules: list[Module], most: int = 80) -> list[Module]:
    """Files of fewer than `most` lines that one other alone imports, packages not counted."""
    names = {module.name for module in modules}
    importers = Counter(name for m in modules for name in m.imported(names) - {m.name})
    return [
        m
        for m in modules
        if len(m.lines) < most and importers[m.name] == 1 and m.path.stem != "__init__"
    ]


def bases_of(
    known: Mapping[str, Module], module: Module, name: str
) -> Iterator[tuple[Module, ast.ClassDef]]:
    """The base classes of a class of a module that are in known modules, and their own bases."""
    for base in module.classes[name].bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
        where, of = module, ast.unparse(base)
        while of not in where.classes and of in where.origins:
            source, of = where.origins[of]
            if source not in known:
                break
            where = known[source]
        if of in where.classes and (where, of) != (module, name):
            yield where, where.classes[of]
            yield from bases_of(known, where, of)


def is_explained(known: Mapping[str, Module], method: Function) -> bool:
    """Whether a method has a docstring, or overrides one of a class of ours that has one."""
    ours = [
        node for _, base in bases_of(known, method.module, method.owners[-1]) for node in base.body
    ]
    overridden = [n for n in ours if isinstance(n, FUNCTION) and n.name == method.node.name]
    return any(ast.get_docstring(node) for node in [method.node, *overridden])


def unexplained_methods(modules: list[Module]) -> list[Function]:
    """Public methods of public classes that no docstring explains, here or in a base class."""
    known = {module.name: module for module in modules}
    functions = [f for m in modules for f in m.functions if f.public and f.owners]
    methods = [f for f in functions if not any(name.startswith("_") for name in f.owners)]
    return [f for f in methods if not is_explained(known, f)]


def functions_without_shape(modules: list[Module]) -> list[Function]:
    """Public functions with a Tensor in their signature that state no shape."""
    public = [f for module in modules for f in module.functions if f.public]
    return [f for f in public if f.takes_tensors and not f.states_shape]


def figures(modules: list[Module]) -> dict[str, str]:
    """The figures of some modules, ready to print."""
    functions = [f for module in modules for f in module.functions]
    public = [f for f in functions if f.public]
    documented = [f for f in public if ast.get_docstring(f.node)]
    tensors, shapeless = [f for f in public if f.takes_tensors], functions_without_shape(modules)
    arguments = [argument for f in functions for argument in f.arguments]
    circles, upward = import_circles(modules), upward_imports(modules)
    files, lengths = [len(m.lines) for m in modules], [f.lines for f in functions]
    comments = [line for m in modules for line in m.lines if line.lstrip().startswith("#")]
    return {
        "files / lines": f"{len(files)} / {sum(files)}",
        "file median / p90 / max": _spread(files),
        "functions": str(len(functions)),
        "function median / p90 / max": _spread(lengths),
        "> 40 / > 60 lines": f"{sum(n > 40 for n in lengths)} / {sum(n > 60 for n in lengths)}",
        "public with docstring": _share(len(documented), public),
        "of tensors, shape stated": _share(len(tensors) - len(shapeless), tensors),
        "arguments typed": _share(sum(a.annotation is not None for a in arguments), arguments),
        "import circles / upward": f"{len(circles)} / {len(upward)}",
        "docstring lines": _share(sum(m.docstring_lines for m in modules), range(sum(files))),
        "comment lines": _share(len(comments), range(sum(files))),
    }


def _spread(sizes: list[int]) -> str:
    ninth = quantiles(sizes, n=10, method="inclusive")[-1]
    return f"{median(sizes):.0f} / {ninth:.0f} / {max(sizes)}"


def _share(part: int, whole: "list[Function] | list[ast.arg] | range") -> str:
    return f"{100 * part / len(whole):.1f} % of {len(whole)}" if whole else "-"


def main() -> None:
    """Print the figures of each layer and of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--missing", action="store_true", help="list functions without a shape")
    options = parser.parse_args()
    modules = all_modules(options.root)
    columns = {layer: figures([m for m in modules if m.layer == layer]) for layer in LAYERS}
    columns["all"] = figures(modules)
    table = Table("", *columns)
    for row in columns["all"]:
        table.add_row(row, *(column[row] for column in columns.values()))
    long = [f"{f.lines} lines: {f}" for m in modules for f in m.functions if f.lines > 60]
    circles = [f"circle: {', '.join(circle)}" for circle in import_circles(modules)]
    missing = [f"no shape: {f}" for f in functions_without_shape(modules) if options.missing]
    Console(width=120).print(table)
    print(*long, *circles, *upward_imports(modules), *missing, sep="\n")
    step = [m for m in modules if str(m.path).startswith(ONE_STEP)]
    loop = reached_from(modules, "drafthead.infer.engine.loop")
    chain, small = longest_chain(modules), small_files(modules)
    print(
        f"one step reads in {sum(len(m.lines) for m in step)} lines, {len(step)} files",
        f"the loop imports {sum(len(m.lines) for m in loop)} lines, {len(loop)} files",
        f"longest chain of imports: {len(chain)} modules, {' > '.join(chain)}",
        f"under 80 lines with one importer: {len(small)}, {', '.join(str(m.path) for m in small)}",
        sep="\n",
    )


if __name__ == "__main__":
    main()
