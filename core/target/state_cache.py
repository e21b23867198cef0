"""A cache of columns and running states: layers with convolutions and recurrences keep the latter.

A pass keeps the state after each of its nodes, and computes a node from that of its parent. So a
state branches as a tree does, nothing is computed twice, and a commit goes on with the state after
the last accepted node of each row::

    place      0   1  2  3  4      of a state: 0 is what was committed
    node           0  1  2  3
    parent         0  1  1  2      of a root with two children and a grandchild

Of a pass over a prompt only the state after its last token is kept.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from drafthead.core.host import to_host
from drafthead.core.kv_cache.column_cache import (
    FRESH,
    ColumnCache,
    FreshMemory,
    Mover,
    move_columns,
)
from drafthead.core.row_state import chosen, joined
from drafthead.core.target.tree_cache import TreeCache

Slot = tuple[int, int]  # a layer, and which of its states
States = dict[Slot, torch.Tensor]  # [B, ...]
# Outputs [R, ...] and states [R, ...] after R nodes, from the states before them, which it leaves
# as they are, and from where the nodes are in a table [B, N, ...]: rows and numbers.
Step = Callable[[torch.Tensor, Any, Any], tuple[torch.Tensor, torch.Tensor]]


class RunningStates(NamedTuple):
    """The states that layers carry after the committed positions of each row."""

    recurrent: States
    windows: States  # [B, C, K] the last K inputs of convolutions


class CutPoint(NamedTuple):
    """Lengths at which texts can be cut, and the states after them."""

    lengths: torch.Tensor  # [B]
    states: RunningStates


class StateCache(TreeCache):
    """Columns of attention layers, and the states of all others."""

    # Whether single tokens leave the states that a pass over them as a prompt does. Else texts can
    # only be cut where a pass over a prompt ended.
    reads_alike = True

    def __init__(self, memory: FreshMemory = FRESH, move: Mover = move_columns) -> None:
        super().__init__(memory, move)
        self.running = RunningStates({}, {})
        self.before: CutPoint | None = None  # the last commit
        self.stepped = False  # whether `running` is other than a pass over a prompt would leave it
        self.slot: Slot = (0, 0)  # that was asked for last
        # Place of the parent of each node [B, pending + N]; None where a pass reads a prompt.
        self.parents: torch.Tensor | None = None
        self.is_chain = True  # whether each new node follows the one before it; else
        self.levels: list[torch.Tensor] = []  # new nodes [B, W] by depth; a row may have one twice
        self.after: dict[Slot, list[torch.Tensor]] = {}  # of each place [B, ...]
        self.columns_of: States = {}  # [B, C, K + pending + N] a window and the inputs after it
        self.last: States = {}  # [B, ...] after all tokens of a pass over a prompt

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """The memory [...] that committed positions take."""
        kept = [self.running] if self.before is None else [self.running, self.before.states]
        return [*self.states, *(s for each in kept for part in each for s in part.values())]

    # ---- what a pass gives, and what layers ask for ---------------------------------------------

    def mask(self, visible: torch.Tensor) -> torch.Tensor:  # [B or 1, N, pending + N]
        assert self.lengths is not None
        kept, rows = self.pending, len(self.lengths)
        known = None if self.parents is None else self.parents[:, :kept]
        if not kept:
            self._forget_pass()
        parents = parents_of(visible)
        places = torch.arange(kept, visible.shape[2], device=parents.device)
        self.is_chain = bool((parents == places).all())
        self.levels = []
        if not self.is_chain:
            self.levels = levels_of(visible[:, :, kept:].sum(-1) - 1, rows)
        parents = parents.expand(rows, -1)
        self.parents = parents if known is None else torch.cat([known, parents], dim=1)
        return super().mask(visible)

    def later_mask(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # [T]
        mask = super().later_mask(places, dtype)
        if len(places) > 1:  # a single one is read as a node
            self.parents = None
        return mask

    @property
    def steps(self) -> bool:
        """Whether a pass computes node by node; else it reads a prompt."""
        return self.parents is not None

    @property
    def new_nodes(self) -> int:
        """Number N of nodes of a pass."""
        assert self.parents is not None
        return self.parents.shape[1] - self.pending

    def is_recording_past(self, layer_idx: int) -> bool:
        """Tell convolutions to leave their inputs to the cache."""
        return True

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether anything was committed."""
        return any(self.running)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs [B, C, K] of a convolution; None before a prompt."""
        self.slot = layer_idx, state_idx
        return self.running.windows.get(self.slot)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A committed state [B, ...]; None before a prompt."""
        self.slot = layer_idx, state_idx
        return self.running.recurrent.get(self.slot)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,  # [B, C, N]
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Take N new inputs of a convolution; returns them after all that may precede them."""
        slot, window = (layer_idx, state_idx), self.running.windows.get((layer_idx, state_idx))
        if window is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.columns_of[slot] = pad(conv_states, (width, 0))
            return conv_states
        known = self.columns_of.get(slot, window)[:, :, : window.shape[-1] + self.pending]
        self.columns_of[slot] = torch.cat([known, conv_states], dim=-1)
        return self.columns_of[slot]

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,  # [B, ...]
        layer_idx: int,
        state_idx: int = 0,
        **kwargs: object,
    ) -> torch.Tensor:
        """Take the state after a pass over a prompt; `follow` knows those after nodes."""
        if not self.steps:
            self.last[layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def follow(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [B, N, ...] of the new nodes for the state that was asked for last, level by
        level, and a state of them.
        """
        assert self.parents is not None
        states = self.after.get(self.slot, [self.running.recurrent[self.slot]])
        states = states[: 1 + self.pending]
        count = self.new_nodes
        if self.is_chain:
            outputs = []
            for node in range(count):
                output, state = step(states[-1], slice(None), node)
                outputs.append(output)
                states.append(state)
            self.after[self.slot] = states
            return torch.stack(outputs, dim=1), states[-1]
        table = torch.stack([*states, *states[:1] * count], dim=1)  # [B, 1 + pending + N, ...]
        found = self._by_levels(step, table, count)
        self.after[self.slot] = list(table.unbind(1))
        return found, table[:, -1]

    def _by_levels(self, step: Step, table: torch.Tensor, count: int) -> torch.Tensor:
        """Outputs [B, N, ...] of the new nodes, whose states fill up the table."""
        assert self.parents is not None
        rows = torch.arange(len(table), device=table.device)[:, None]
        found: torch.Tensor | None = None
        for nodes in self.levels:
            of_rows, places = rows.expand_as(nodes), self.parents.gather(1, self.pending + nodes)
            before = table[of_rows, places].flatten(0, 1)
            outputs, states = step(before, of_rows.flatten(), nodes.flatten())
            table[of_rows, 1 + self.pending + nodes] = states.view(*nodes.shape, *states.shape[1:])
            if found is None:
                found = outputs.new_empty(len(table), count, *outputs.shape[1:])
            found[of_rows, nodes] = outputs.view(*nodes.shape, *outputs.shape[1:])
        assert found is not None
        return found

    def windows(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """The last `width` inputs [B, C, N, width] of each new node's path, of columns as
        `update_conv_state` returns them.
        """
        assert self.parents is not None
        if self.is_chain:
            return columns[:, :, 1 - width - self.new_nodes :].unfold(-1, width, 1)
        nodes = torch.arange(1 + self.pending, 1 + self.parents.shape[1], device=columns.device)
        first = columns.shape[-1] - self.parents.shape[1]  # the column of the first node
        path = self._columns(nodes.expand(len(columns), -1), first, width)
        rows = torch.arange(len(columns), device=columns.device)[:, None, None]
        return columns.transpose(1, 2)[rows, path].permute(0, 3, 1, 2)

    def _columns(self, places: torch.Tensor, first: int, width: int) -> torch.Tensor:
        """The last `width` columns [B, R, width] of the paths to places [B, R]."""
        parents = self.parents
        assert parents is not None
        found = [places + first - 1]
        while len(found) < width:
            above = parents.gather(1, (found[-1] - first).clamp_min(0).flatten(1))
            is_node = found[-1] >= first
            found.append(torch.where(is_node, above.view_as(places) + first - 1, found[-1] - 1))
        return torch.stack(found[::-1], dim=-1)

    # ---- what is committed ----------------------------------------------------------------------

    def commit(
        self,
        path: torch.Tensor | None,  # [B, K]
        lengths: torch.Tensor,  # [B]
        longest: int,
    ) -> None:
        assert self.lengths is not None
        if self.columns_of or self.last or self.after:
            count = lengths - self.lengths
            places = count
            if path is not None:
                ends = path.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
                places = torch.where(count > 0, ends + 1, 0)
            self._go_on_from(places)
        super().commit(path, lengths, longest)

    def commit_prompt(self, lengths: torch.Tensor, longest: int, room: int) -> None:  # [B]
        if not self.prompt_states:  # one column takes the place of keys
            nothing = torch.zeros(len(lengths), 1, longest, 1, device=lengths.device)
            self.prompt_states[0] = nothing, nothing
        super().commit_prompt(lengths, longest, room)
        self._go_on_from(lengths)

    def _go_on_from(self, places: torch.Tensor) -> None:
        """Keep the states at a place [B] of each row."""
        assert self.lengths is not None
        if any(self.running) and not self.stepped:
            self.before = CutPoint(self.lengths, self.running)
        self.stepped = self.steps and not self.reads_alike
        numbers = to_host(places)
        alike = len({*numbers}) == 1
        rows = torch.arange(len(places), device=places.device)

        def kept(states: list[torch.Tensor]) -> torch.Tensor:
            if not alike:
                return torch.stack(states, dim=1)[rows, places]
            # A view would keep the states after all nodes of a tree in memory.
            return states[numbers[0]] if self.is_chain else states[numbers[0]].clone()

        recurrent = {slot: kept(states) for slot, states in self.after.items()}
        windows = {}
        for slot, columns in self.columns_of.items():
            known = self.running.windows.get(slot)
            width = columns.shape[-1] - numbers[0] if known is None else known.shape[-1]
            if not self.steps or (alike and self.is_chain):
                end = width + numbers[0]
                windows[slot] = columns[:, :, end - width : end].clone()
            else:
                path = self._columns(places[:, None], width, width)[:, 0]
                windows[slot] = columns.transpose(1, 2)[rows[:, None], path].transpose(1, 2)
        self.running = RunningStates(recurrent | self.last, windows)
        self._forget_pass()

    def _forget_pass(self) -> None:
        # New dictionaries: a copy of this cache may go on from the old ones.
        self.after, self.columns_of, self.last, self.parents = {}, {}, {}, None

    @property
    def cuts_anywhere(self) -> bool:
        return False

    def cuttable(self, length: int) -> int:
        if self.longest <= length and not self.stepped:
            return self.longest
        kept = 0 if self.before is None else int(self.before.lengths.max())
        return kept if kept <= length else 0

    def cut(self, length: int) -> None:
        """Do as `ColumnCache.cut`, to a length that is `cuttable`."""
        if length < self.longest:
            assert self.before is not None and length == self.cuttable(length)
            self.running, self.stepped = self.before.states, False
        self.before = None
        super().cut(length)
        self._forget_pass()

    def keep_rows(self, rows: torch.Tensor, longest: int | None = None) -> None:  # [B]
        self._take_rows(rows)
        super().keep_rows(rows, longest)

    def repeat_rows(self, rows: Sequence[int], first: int, num_nodes: int) -> None:
        self._take_rows(torch.tensor(rows, device=self.device))
        super().repeat_rows(rows, first, num_nodes)

    def _take_rows(self, rows: torch.Tensor) -> None:
        """Go on with the states of rows [R], those after nodes too."""
        for name in ("running", "before", "columns_of", "parents"):
            setattr(self, name, chosen(getattr(self, name), rows))
        self.after = {slot: [s[rows] for s in states] for slot, states in self.after.items()}

    def join_rows(
        self, other: ColumnCache, order: Sequence[int], longest: int | None = None
    ) -> None:
        assert isinstance(other, StateCache)
        points = [self._cut_point(), other._cut_point()]
        self.stepped = self.stepped or other.stepped
        self.before = joined(points, order) if self.stepped and None not in points else None
        self.running = joined([self.running, other.running], order)
        super().join_rows(other, order, longest)

    def collect(
        self, parts: Sequence[ColumnCache], places: Sequence[Sequence[int]], room: int
    ) -> None:
        super().collect(parts, places, room)
        order = torch.tensor([place for group in places for place in group]).argsort().tolist()
        states = [part.running for part in parts if isinstance(part, StateCache)]
        self.before, self.running = None, joined(states, order)

    def _cut_point(self) -> CutPoint | None:
        """The last one, which is now unless the last pass was a step."""
        if self.stepped:
            return self.before
        assert self.lengths is not None
        return CutPoint(self.lengths, self.running)

    @property
    def device(self) -> torch.device:
        """Of the keys."""
        return self.keys[0].device


def parents_of(visible: torch.Tensor) -> torch.Tensor:
    """The places [B, N] of the parents of new nodes, of which pending and new nodes each new one
    sees [B, N, pending + N]: a parent is the last that a node sees, itself left out.

    Of a root with two children and a grandchild of the first they are 0 1 1 2.
    """
    count, total = visible.shape[1:]
    places = torch.arange(1, total + 1, device=visible.device)
    own = places[total - count :, None]
    return (visible & (places < own)).long().mul(places).amax(-1)


def levels_of(depths: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """The nodes [B, W] of each depth, of the depths [B or 1, N] of nodes among the new ones.

    Where a row has fewer than another its node 0 fills up: to compute it twice changes nothing.
    """
    groups: list[list[list[int]]] = [[] for _ in range(len(depths))]
    for row, group in zip(to_host(depths), groups, strict=True):
        group += [[] for _ in range(max(row) + 1)]
        for node, depth in enumerate(row):
            group[depth].append(node)
    levels = list(zip_longest(*groups, fillvalue=()))
    widths = [max(map(len, level)) for level in levels]
    tables = [
        [[*nodes, *[0] * (width - len(nodes))] for nodes in level]
        for level, width in zip(levels, widths, strict=True)
    ]
    return [torch.tensor(table, device=depths.device).expand(rows, -1) for table in tables]
