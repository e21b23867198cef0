"""The few largest of many numbers, for processors with AVX512.

torch sorts a good part of a row to find its eight best of thousands, and prepares for longer than
it sorts. Here a row is compared with the last of its best so far, sixteen numbers at a time, and
hardly any is larger.
"""

from math import prod
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.utils import parallel_num_threads

MOST = 64  # beyond, sorting is faster


@torch.library.custom_op("drafthead::top", mutates_args=())
def top(x: torch.Tensor, count: int) -> torch.Tensor:
    """Places [..., k] of the k largest of x [..., V] float32, from the largest on, k <= `MOST`.

    Of equals the first comes first: of 1 3 3 2 the places of the two largest are 1 and 2.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].clone()


@top.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    torch._check(count <= x.shape[-1])
    return x.new_empty(*x.shape[:-1], count, dtype=torch.int64)


class TopTemplate(CppTemplate):
    """The source of the function, for the code generator."""

    SOURCE = r"""
{{template.header().getvalue()}}
#ifndef DRAFTHEAD_TOP  // one file may hold this for inputs of several sizes
#define DRAFTHEAD_TOP
namespace {
void top(const float* x, int64_t rows, int64_t size, int64_t* places, int64_t count, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = x + r * size;
        int64_t* best = places + r * count;
        float values[{{most}}];
        // Puts a number where it belongs among the best, of which that at `rank` drops out.
        auto put = [&](int64_t rank, int64_t place) {
            for (; rank > 0 && values[rank - 1] < row[place]; --rank) {
                values[rank] = values[rank - 1];
                best[rank] = best[rank - 1];
            }
            values[rank] = row[place];
            best[rank] = place;
        };
        for (int64_t place = 0; place < count; ++place) put(place, place);
        for (int64_t start = count; start < size; start += 16) {
            const auto some = (__mmask16)((1u << std::min<int64_t>(16, size - start)) - 1);
            const __m512 last = _mm512_set1_ps(values[count - 1]);
            const __m512 found = _mm512_maskz_loadu_ps(some, row + start);
            for (unsigned larger = _mm512_mask_cmp_ps_mask(some, found, last, _CMP_GT_OQ); larger;
                 larger &= larger - 1) {
                const int64_t place = start + __builtin_ctz(larger);
                if (row[place] > values[count - 1]) put(count - 1, place);
            }
        }
    }
}
}  // namespace
#endif

extern "C"
{{kernel.def_kernel(inputs={"x": x}, outputs={"places": places})}}
{
    {{kernel.maybe_codegen_profile("top")}}
    top(&{{kernel.index(x, [0, 0])}}, {{kernel.size(x, 0)}}, {{kernel.size(x, 1)}}, places,
        {{kernel.size(places, 1)}}, {{num_threads}});
}
"""

    def render(self, **given: Any) -> str:
        """The source for the inputs at hand; nothing is fused behind it."""
        assert not given.get("epilogue_nodes")
        options = {
            "template": self,
            "kernel": given["kernel"],
            "x": self.input_nodes[0],
            "places": given.get("template_buffer_node") or self.output_node,
            "most": MOST,
            "num_threads": self.num_threads,
        }
        return self._template_from_string(self.SOURCE).render(**options)


@register_lowering(torch.ops.drafthead.top.default, type_promotion_kind=None)
def _lower(x: Any, count: int) -> Any:
    """The operation in the code generator's graph."""
    *outer, size = x.get_size()
    view = lowerings[torch.ops.aten.view.default]
    rows = ir.ExternKernel.require_contiguous(view(x, [prod(outer), size]))
    layout = ir.FixedLayout(x.get_device(), torch.int64, [prod(outer), count], [count, 1])
    template = TopTemplate("top", [rows], layout, parallel_num_threads())
    return view(template.generate().output_node(), [*outer, count])
