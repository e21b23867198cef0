"""The conditions on a graph's inputs, in a form that can be written to a file.

torch derives them while it traces, as expressions of the sizes that may change. A graph is called
only with inputs that meet them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.printers import PythonPrinter

Fits = Callable[[Sequence[Any]], bool]


class Layout(NamedTuple):
    """Conditions on inputs t, as Python. For t = keys [s0, 8], queries [s1, 8] with s0 <= s1::

    places {0: float32, 1: float32}   symbols {s0: t[0].shape[0], s1: t[1].shape[0]}
    sizes [(s0, 8,), (s1, 8,)]   strides [(8, 1,), (8, 1,)]   rules [2 <= s0, 2 <= s1, s0 <= s1]
    """

    dtypes: list[str | None]  # of the tensors among the inputs; None for a number
    symbols: dict[str, str]  # sizes that may change, and where each is read
    sizes: list[str]  # of each tensor
    strides: list[str]
    rules: list[str]

    @property
    def places(self) -> list[int]:
        """Which inputs are tensors."""
        return [place for place, dtype in enumerate(self.dtypes) if dtype is not None]

    def is_met(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs of an unknown kind meet the conditions."""
        found = [str(t.dtype) if isinstance(t, torch.Tensor) else None for t in inputs]
        dims = [len(sizes.split(",")) - 1 for sizes in self.sizes]
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        alike = found == self.dtypes and [t.dim() for t in tensors] == dims
        return alike and checker(self, inputs)(inputs)


def layout_of(examples: Sequence[Any]) -> Layout:
    """The conditions on inputs like these: what a graph was traced with."""
    places = [place for place, t in enumerate(examples) if isinstance(t, torch.Tensor)]
    tensors = [examples[place] for place in places]
    symbols = symbols_in(examples)
    return Layout(
        [str(t.dtype) if isinstance(t, torch.Tensor) else None for t in examples],
        symbols,
        [written(t.shape) for t in tensors],
        [written(t.stride()) for t in tensors],
        rules_of(examples, symbols),
    )


def expression(size: Any) -> Any:
    """A size as a number or as torch's expression for it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def python(size: Any) -> str:
    """A size as Python."""
    return PythonPrinter().doprint(expression(size))


def written(sizes: Sequence[Any]) -> str:
    """Sizes as a tuple of Python: (s0, 8,)."""
    return f"({''.join(f'{python(size)}, ' for size in sizes)})"


def symbols_in(examples: Sequence[Any]) -> dict[str, str]:
    """Where the size of each symbol is read."""
    found: dict[str, str] = {}
    for place, example in enumerate(examples):
        if isinstance(example, torch.Tensor):
            read = {f"t[{place}].shape[{dim}]": size for dim, size in enumerate(example.shape)}
            strides = enumerate(example.stride())
            read |= {f"t[{place}].stride({dim})": size for dim, size in strides}
        else:
            read = {f"t[{place}]": example}
        for where, size in read.items():
            if getattr(expression(size), "is_Symbol", False):
                found.setdefault(python(size), where)
    return found


def rules_of(examples: Sequence[Any], symbols: dict[str, str]) -> list[str]:
    """What torch took for granted of the sizes that may change."""
    sizes = [
        size
        for t in examples
        for size in (t.shape if isinstance(t, torch.Tensor) else [t])
        if isinstance(size, torch.SymInt)
    ]
    if not sizes:
        return []
    known = sizes[0].node.shape_env
    rules = [python(known.simplify(guard.expr)) for guard in known.guards]
    for symbol, within in known.var_to_range.items():
        if str(symbol) in symbols:
            rules.append(f"{within.lower} <= {symbol}")
            if within.upper.is_finite and within.upper < torch.iinfo(torch.int64).max:
                rules.append(f"{symbol} <= {within.upper}")
    return [rule for rule in dict.fromkeys(rules) if rule != "True"]


def checker(layout: Layout, inputs: Sequence[Any]) -> Fits:
    """A function that tells whether inputs meet the conditions, which `inputs` seem to.

    It also compares what is no size: the class of tensors, and whether they need gradients.
    """
    tensors = [inputs[place] for place in layout.places]
    free = [[None] * t.dim() for t in tensors]
    alike = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=free,  # type: ignore[arg-type]
        dynamic_dims_strides=free,  # type: ignore[arg-type]
    )
    # Most tensors share their sizes, and each tuple is made once a call.
    tuples = list(dict.fromkeys([*layout.sizes, *layout.strides]))
    lines = [f"{symbol} = {where}" for symbol, where in layout.symbols.items()]
    lines += [f"if not ({rule}): return False" for rule in layout.rules]
    lines += [f"d{number} = {sizes}" for number, sizes in enumerate(tuples)]
    for place, *both in zip(layout.places, layout.sizes, layout.strides, strict=True):
        lines.append(f"same(t[{place}], {', '.join(f'd{tuples.index(part)}' for part in both)})")
    listed = ", ".join(f"t[{place}]" for place in layout.places)
    body = "\n  ".join([f"if not alike({listed}): return False", "try:", *map(indented, lines)])
    end = "except AssertionError: return False\n  return True"
    names: dict[str, Any] = SYMPY_INTERP | {
        "alike": alike.check,
        "same": torch._C._dynamo.guards.assert_size_stride,
    }
    # Written out as code: a loop over conditions would take longer than a small pass may.
    exec(f"def fits(t):\n  {body}\n  {end}", names)
    return names["fits"]


def indented(line: str) -> str:
    """A line of an inner block."""
    return f"  {line}"
