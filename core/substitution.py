"""Other functions instead of torch's, within a context and for some arguments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode


class Substitution(NamedTuple):
    """A function that runs instead of an operation, for some arguments."""

    operation: Callable[..., Any]
    replacement: Callable[..., Any]  # takes the operation's arguments
    condition: Callable[..., bool]  # on these arguments


class Substituting(TorchFunctionMode):
    """A context in which operations are replaced, whoever calls them."""

    def __init__(self, rows: Sequence[Substitution]):
        """Of several rows for an operation the first whose condition holds counts."""
        super().__init__()
        self.rows = tuple(rows)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the first replacement whose condition holds, or else the operation."""
        kwargs = kwargs or {}
        for row in self.rows:
            if func is row.operation and row.condition(*args, **kwargs):
                return row.replacement(*args, **kwargs)
        return func(*args, **kwargs)
