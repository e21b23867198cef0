"""Values that a graph computes once and keeps."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from drafthead.backends.compiled import has_kernels
from drafthead.backends.cpu.kernels.rewrites import STORED, store_rotations

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no kernels for this processor")


def test_all_that_reads_a_sine_or_cosine_reads_what_is_kept_of_it() -> None:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = x.cos(), x.sin()
        return cos * 2 + sin * 3 + cos * sin

    x = torch.randn(4)
    traced = make_fx(rotated)(x)
    store_rotations(traced.graph)
    traced.recompile()
    for target in STORED:
        [node] = traced.graph.find_nodes(op="call_function", target=target)
        [reader] = node.users
        assert reader.target is torch.ops.drafthead.kept.default and len(reader.users) == 2
    assert torch.equal(traced(x), rotated(x))
