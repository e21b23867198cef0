"""What the GPU's attention kernel computes, in plain sums of float64, and cases to compare by."""

from dataclasses import dataclass, field

import torch

from drafthead.backends.cuda.tree_attention import Blocks, ancestor_bits, tree_attention


@dataclass
class Case:
    """Random arguments of a call; sizes are the smallest that show something unless given."""

    heads: int = 2
    groups: int = 1
    nodes: int = 3
    head_size: int = 16
    lengths: tuple[int, ...] = (21, 4)
    capacity: int = 96
    pending: int = 0
    gaps: bool = False  # all rows begin their tree at one column
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        rows, pool = len(self.lengths), (self.groups, self.capacity, self.head_size)
        new = rows, self.groups, self.nodes, self.head_size
        # As models give them: heads after nodes in memory.
        self.query = self.normal(rows, self.nodes, self.heads, self.head_size).transpose(1, 2)
        self.keys, self.values = self.normal(rows, *pool), self.normal(rows, *pool)
        self.new_keys, self.new_values = self.normal(*new), self.normal(*new)
        self.length = torch.tensor(self.lengths, device=self.device)
        longest = self.length.max()
        self.starts = longest.expand(rows) if self.gaps else None
        self.visible = random_ancestors(rows, self.pending + self.nodes, self.random)
        self.visible = self.visible[:, self.pending :].to(self.device)
        self.sinks = self.normal(self.heads) if self.with_sinks else None

    def normal(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self.random)
        return numbers.to(self.device, self.dtype)

    @property
    def first(self) -> torch.Tensor | None:
        """The first column [B, N] that each node sees."""
        if self.window is None:
            return None
        return (self.length[:, None] + self.visible.sum(-1) - self.window).clamp_min(0)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The attention [B, N, H x D], and the cache's keys and values after it."""
        keys, values = self.keys.clone(), self.values.clone()
        outputs = []
        for row, length in enumerate(self.lengths):
            start = length if self.starts is None else int(self.starts[row])
            end = start + self.pending + self.nodes
            keys[row, :, start + self.pending : end] = self.new_keys[row]
            values[row, :, start + self.pending : end] = self.new_values[row]
            columns = torch.arange(self.capacity, device=self.device)
            seen = (columns < length).expand(self.nodes, -1).clone()
            if self.first is not None:
                seen &= columns >= self.first[row, :, None]
            seen[:, start:end] = self.visible[row]
            outputs.append(self.attention(self.query[row], keys[row], values[row], seen))
        return torch.stack(outputs), keys, values

    def attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Of one row: query [H, N, D], keys and values [G, C, D], seen [N, C]."""
        keys, values = (
            t.double().repeat_interleave(self.heads // self.groups, 0) for t in (keys, values)
        )
        scores = query.double() @ keys.mT * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, self.nodes, 1)
            scores = torch.cat([scores, sinks], -1)
            values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
        return (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)

    @property
    def scale(self) -> float:
        """The factor of scores, not the usual one."""
        return 1.5 * self.head_size**-0.5


def attended(case: Case, blocks: Blocks | None = None) -> torch.Tensor:
    """The kernel's attention [B, N, H x D]; it stores the new keys and values of the case."""
    return tree_attention(
        case.query,
        case.keys,
        case.values,
        case.new_keys,
        case.new_values,
        case.length,
        ancestor_bits(case.visible),
        scale=case.scale,
        first=case.first,
        starts=case.starts,
        pending=case.pending,
        softcap=case.softcap,
        sinks=case.sinks,
        blocks=blocks,
    )


def random_ancestors(rows: int, nodes: int, random: torch.Generator) -> torch.Tensor:
    """What each node of random trees sees, bool [B, N, N]: its ancestors and itself."""
    visible = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    for node in range(1, nodes):
        parents = torch.randint(node, (rows,), generator=random)
        visible[:, node] |= visible[torch.arange(rows), parents]
    return visible
