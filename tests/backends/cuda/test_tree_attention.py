"""The attention kernel against plain sums, interpreted or on a GPU; see conftest.py."""

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from stages import more
from tree_reference import Case, attended
from triton.runtime.errors import OutOfResources

from drafthead.backends.cuda import tree_attention as module
from drafthead.backends.cuda.tree_attention import Blocks, ancestor_bits, tree_attention

DEVICE = os.environ["KERNELS_ON"]
ALONE = Blocks(splits=1, least=16, rows=16, columns=16, warps=4, stages=2)
SPLIT = ALONE._replace(splits=4)
DTYPES = torch.float32, torch.float16, torch.bfloat16
SOME_HEADS = [(8, torch.float32), (80, torch.float16), (256, torch.bfloat16)]


def check(case: Case, blocks: Blocks | None = SPLIT) -> None:
    """The kernel's attention and stores are those of the reference."""
    output, keys, values = case.expected()
    result = attended(case, blocks)
    least = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]
    assert result.dtype == case.dtype
    torch.testing.assert_close(result.double(), output, rtol=least, atol=least)
    assert torch.equal(case.keys, keys) and torch.equal(case.values, values)


@pytest.mark.parametrize("ratio", [1, 3, 7, *map(more, (2, 4, 5, 6))])
def test_query_heads_share_keys(ratio: int) -> None:
    check(Case(heads=2 * ratio, groups=2, lengths=(21,), device=DEVICE))


@pytest.mark.parametrize("least", [16, 64])
def test_short_rows_make_fewer_parts(least: int) -> None:
    check(Case(lengths=(21, 70), device=DEVICE), SPLIT._replace(least=least))


def test_work_is_cut_up_by_shapes_alone() -> None:
    check(Case(device=DEVICE), blocks=None)


@pytest.mark.parametrize(
    ("nodes", "heads", "blocks"), [(1, 2, SPLIT), (17, 2, SPLIT), (63, 1, ALONE), (64, 1, SPLIT)]
)
def test_a_tree_has_up_to_64_nodes(nodes: int, heads: int, blocks: Blocks) -> None:
    check(Case(heads=heads, nodes=nodes, lengths=(21,), device=DEVICE), blocks)


@pytest.mark.parametrize("lengths", [(0,), (1, 0, 64), (15, 33, 88)])
@pytest.mark.parametrize("gaps", [False, True])
def test_rows_are_of_any_length(lengths: tuple[int, ...], gaps: bool) -> None:
    check(Case(lengths=lengths, gaps=gaps, device=DEVICE))


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        pair if pair in SOME_HEADS else more(*pair)
        for pair in product([8, 64, 80, 96, 128, 256], DTYPES)
    ],
)
def test_heads_are_of_any_size(head_size: int, dtype: torch.dtype) -> None:
    check(Case(head_size=head_size, dtype=dtype, lengths=(21,), device=DEVICE))


@pytest.mark.parametrize("window", [1, more(2), 20])
@pytest.mark.parametrize("blocks", [ALONE, SPLIT])
def test_a_node_sees_from_its_first_column_on(window: int, blocks: Blocks) -> None:
    check(Case(window=window, lengths=(5, 60), device=DEVICE), blocks)


@pytest.mark.parametrize("blocks", [ALONE, SPLIT])
def test_scores_are_capped(blocks: Blocks) -> None:
    check(Case(softcap=0.7, device=DEVICE), blocks)


@pytest.mark.parametrize("blocks", [ALONE, SPLIT])
@pytest.mark.parametrize("lengths", [(21,), (0,)])
def test_sinks_take_weight(blocks: Blocks, lengths: tuple[int, ...]) -> None:
    check(Case(heads=6, groups=2, with_sinks=True, lengths=lengths, device=DEVICE), blocks)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("pending", [1, 20])
def test_nodes_follow_pending_ones(gaps: bool, pending: int) -> None:
    check(Case(heads=4, groups=2, pending=pending, gaps=gaps, device=DEVICE))


def test_all_at_once() -> None:
    case = Case(
        heads=6,
        groups=2,
        nodes=5,
        head_size=80,
        lengths=(40, 3),
        pending=9,
        gaps=True,
        window=12,
        softcap=2.0,
        with_sinks=True,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case)


@pytest.mark.parametrize("blocks", [ALONE, SPLIT])
def test_a_node_that_sees_nothing_gets_zeros(blocks: Blocks) -> None:
    case = Case(lengths=(0,), nodes=3, device=DEVICE)
    case.visible[:, 1] = False
    given = case.query, case.keys, case.values, case.new_keys, case.new_values, case.length
    result = tree_attention(*given, ancestor_bits(case.visible), scale=1.0, blocks=blocks)
    assert result[:, 1].eq(0).all() and result.isfinite().all() and result[:, 2].ne(0).all()


def test_what_lies_beyond_is_never_read() -> None:
    """Also infinities and NaN in columns without a key."""
    case = Case(lengths=(20, 3), device=DEVICE)
    beyond = torch.arange(case.capacity, device=DEVICE) >= case.length[:, None]
    for states in (case.keys, case.values):
        states.masked_fill_(beyond[:, None, :, None], torch.nan)
    given = case.query, case.keys, case.values, case.new_keys, case.new_values, case.length
    result = tree_attention(*given, ancestor_bits(case.visible), scale=1.0, blocks=SPLIT)
    assert result.isfinite().all()


def test_a_device_without_room_attends_in_smaller_blocks(monkeypatch, caplog) -> None:
    class Device:
        """The kernel on a device that has room for the smallest blocks alone."""

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def run(*given: Any, num_warps: int, num_stages: int) -> None:
                if num_stages > 1:
                    raise OutOfResources(102_400, 101_376, "shared memory")
                attend[grid](*given, num_warps=num_warps, num_stages=num_stages)

            return run

    attend = module.attend
    monkeypatch.setattr(module, "attend", Device())
    for _ in range(2):
        check(Case(nodes=17, device=DEVICE), SPLIT._replace(rows=32))
    (line,) = caplog.messages
    assert "Required: 102400" in line


def test_tables_may_be_shared_by_rows_and_small() -> None:
    case = Case(lengths=(20, 20), device=DEVICE)
    case.visible = case.visible[:1].expand(2, -1, -1)
    case.length = case.length.int()
    check(case)
