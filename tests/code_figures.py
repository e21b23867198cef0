"""Figures of the code, counted from its syntax trees: `python tests/code_figures.py [ROOT]`."""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
# A layer -> the layers that it may import beside itself. What decodes and trains (core, heads,
# infer, train) never imports backends, contrib or lab: they register themselves or are named.
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
# "[B, N, D]", "[V]", "[]"; not `tree[node]` or `list[int]`, where a word comes before the bracket.
SHAPE = re.compile(r"(?<![\w\])])\[([\w.,+*/() -]*[A-Za-z.][\w.,+*/() -]*)?\]")
TENSOR = re.compile(r"\bTensors?\b")  # not `TensorFile`
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
CLAUSE = re.compile(r"(What|How|Which|Where|When|Who|Whose|Why|That|Those|As)\b")


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


def names_in_several_files(modules: list[Module]) -> dict[str, list[str]]:
    """The files of each class name that stands in more than one."""
    files: dict[str, list[str]] = {}
    for module in modules:
        for name in module.classes:
            files.setdefault(name, []).append(str(module.path))
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def inner_imports(modules: list[Module]) -> list[str]:
    """Import statements within functions."""
    return [
        f"{f}: {ast.unparse(node)}"
        for module in modules
        for f in module.functions
        if "<locals>" not in f.owner
        for node in ast.walk(f.node)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def names_for_the_lab(modules: list[Module]) -> set[str]:
    """Names below the lab that it imports beside those of `drafthead.infer`, the public ones."""
    below = tuple(f"drafthead.{layer}." for layer in MAY_IMPORT["lab"])
    return {
        names[0]
        for module in modules
        if module.layer == "lab"
        for names in module.imports
        if names[-1].startswith(below)
    }


def bare_clauses(modules: list[Module]) -> list[str]:
    """Docstrings that begin with a relative clause in place of a noun or a verb."""
    return [
        f"{module.path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTION)
        and (text := ast.get_docstring(node))
        and CLAUSE.match(text)
    ]


def lines_of_cpp(root: Path = ROOT) -> int:
    """Lines of the kernels for CPUs."""
    files = [path for ending in ("h", "cpp") for path in (root / "backends").rglob(f"*.{ending}")]
    return sum(len(path.read_text().splitlines()) for path in files)


def limited(modules: list[Module], root: Path = ROOT) -> dict[str, float]:
    """The figures that have a limit: the smaller, the better."""
    tensors = [f for m in modules for f in m.functions if f.public and f.takes_tensors]
    return {
        **{f"lines of {x}": sum(len(m.lines) for m in modules if m.layer == x) for x in LAYERS},
        "lines of C++": lines_of_cpp(root),
        "chain of imports": len(longest_chain(modules)),
        "class names in several files": len(names_in_several_files(modules)),
        "docstrings that are a clause": len(bare_clauses(modules)),
        "imports within functions": len(inner_imports(modules)),
        "names that lab takes from below": len(names_for_the_lab(modules)),
        "% of tensor functions without shape": round(
            100 * len(functions_without_shape(modules)) / len(tensors), 1
        ),
    }


def main() -> None:
    """Print the figures that have a limit, and the places of those that fall short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the repository")
    root = parser.parse_args().root
    modules = all_modules(root)
    print(
        *(f"{f.lines} lines: {f}" for m in modules for f in m.functions if f.lines > 60),
        *(f"circle: {', '.join(circle)}" for circle in import_circles(modules)),
        *upward_imports(modules),
        *(f"no shape: {f}" for f in functions_without_shape(modules)),
        *(f"clause: {place}" for place in bare_clauses(modules)),
        f"longest chain of imports: {' > '.join(longest_chain(modules))}",
        *(f"{name}: {value:g}" for name, value in limited(modules, root).items()),
        sep="\n",
    )


if __name__ == "__main__":
    main()
