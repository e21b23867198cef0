"""A session's state of each row: rows can be chosen, and joined with those of another."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import torch

from drafthead.core.host import to_host


class RowState:
    """An object whose attributes named in `row_state` have one entry for each row of a batch.

    An attribute may be None, a tensor [B, ...], a list of B things, a named tuple or a dictionary
    of such attributes, or an object that has `keep_rows` and `join_rows` itself, such as a cache.
    """

    row_state: ClassVar[tuple[str, ...]] = ()

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with the rows [R] of the batch only, in that order."""
        for name in self.row_state:
            setattr(self, name, chosen(getattr(self, name), rows))

    def join_rows(self, other: Self, order: Sequence[int]) -> None:
        """Go on with rows of both, as if those of `other` had the numbers after these.

        With 2 rows here and 2 there, order (2, 1) puts the first row of `other` into the place of
        row 0. `other` must not be used any more.
        """
        for name in self.row_state:
            setattr(self, name, joined([getattr(self, name), getattr(other, name)], order))

    def cut(self, length: int) -> None:
        """Forget all after the first `length` positions of each row, in whatever can do that."""
        for name in self.row_state:
            state = getattr(self, name)
            if hasattr(state, "cut"):
                state.cut(length)


def leaves(state: Any) -> Iterator[Any]:
    """The tensors and caches of a state, and what else is not made of others."""
    if isinstance(state, (list, tuple)):
        for part in state:
            yield from leaves(part)
    elif isinstance(state, RowState):
        yield from leaves([getattr(state, name) for name in state.row_state])
    else:
        yield state


def chosen(state: Any, rows: torch.Tensor) -> Any:
    """A copy of the entries of rows [R] of a state; see `RowState` for what that may be.

    Rows 2 0 of the list ``a b c`` are ``c a``.
    """
    if state is None:
        return None
    if isinstance(state, torch.Tensor):
        return state[rows]
    if isinstance(state, list):
        # Copies: a row that is chosen twice goes on in two ways.
        return [copy.copy(state[row]) for row in to_host(rows)]
    if isinstance(state, dict):
        return {name: chosen(part, rows) for name, part in state.items()}
    if isinstance(state, tuple):
        return type(state)(*(chosen(part, rows) for part in state))
    twin = copy.copy(state)
    twin.keep_rows(rows)
    return twin


def joined(states: Sequence[Any], order: Sequence[int]) -> Any:
    """Entries of states of one form, as if the rows of each had the numbers after those before it.

    Of the lists ``a b`` and ``c d``, order 2 1 gives ``c b``. Only two caches can be joined.
    """
    state, *others = states
    if state is None:
        return None
    if isinstance(state, torch.Tensor):
        return torch.cat([*states])[torch.tensor(order, device=state.device)]
    if isinstance(state, list):
        both = [each for part in states for each in part]
        return [both[row] for row in order]
    if isinstance(state, dict):
        return {name: joined([each[name] for each in states], order) for name in state}
    if isinstance(state, tuple):
        return type(state)(*(joined(parts, order) for parts in zip(*states, strict=True)))
    [other] = others
    state.join_rows(other, order)
    return state
