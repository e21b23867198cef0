"""Drawing a token from a row of logits, for processors with AVX512.

torch writes out the probabilities, then their sums as float64, and reads these several times. Here
a row is read twice, for its largest logit and for the mass of each block of tokens, and one block a
third time, for the token.
"""

from math import prod
from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.utils import parallel_num_threads

from drafthead.heads import sampling


@torch.library.custom_op("drafthead::draw", mutates_args=())
def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`sampling.draw`: tokens [...] from logits [..., V] float32 or bfloat16, by uniform [...]."""
    return sampling.draw(logits, temperature, uniform)


@draw.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


class DrawTemplate(CppTemplate):
    """The source of the function, for the code generator."""

    SOURCE = r"""
{{template.header().getvalue()}}
#ifndef DRAFTHEAD_DRAW  // one file may hold this for inputs of several sizes
#define DRAFTHEAD_DRAW
#include <algorithm>
#include <vector>
namespace {
constexpr int64_t BLOCK = 64;  // tokens

inline __m512 sixteen(const float* x, __mmask16 which) { return _mm512_maskz_loadu_ps(which, x); }

inline __m512 sixteen(const at::BFloat16* x, __mmask16 which) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __mmask16 up_to(int64_t count) {
    return (__mmask16)((1u << std::min<int64_t>(16, count)) - 1);
}

template <typename logit_t>
struct Row {
    const logit_t* logits;
    int64_t size;
    float largest, temperature;

    Row(const logit_t* logits, int64_t size, float temperature)
        : logits(logits), size(size), temperature(temperature) {
        const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        __m512 most = least;
        for (int64_t start = 0; start < size; start += 16) {
            const auto which = up_to(size - start);
            most = _mm512_mask_max_ps(most, which, most, sixteen(logits + start, which));
        }
        largest = _mm512_reduce_max_ps(most);
    }

    // exp((logit - largest) / temperature) of sixteen tokens, 0 behind the last.
    __m512 masses(int64_t start) const {
        const auto which = up_to(size - start);
        const __m512 below = _mm512_sub_ps(sixteen(logits + start, which), _mm512_set1_ps(largest));
        const at::vec::Vectorized<float> scaled = _mm512_div_ps(below, _mm512_set1_ps(temperature));
        return _mm512_maskz_mov_ps(which, scaled.exp());
    }

    double mass_of_block(int64_t start) const {
        __m512d sum = _mm512_setzero_pd();
        for (int64_t place = start; place < std::min(start + BLOCK, size); place += 16) {
            const __m512 found = masses(place);
            const __m256 high = _mm512_extractf32x8_ps(found, 1);
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(found)));
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(high));
        }
        return _mm512_reduce_add_pd(sum);
    }

    // The first token at which the cumulative mass exceeds uniform times the whole.
    int64_t draw(double uniform) const {
        std::vector<double> until;  // the end of each block, the mass so far
        until.reserve((size + BLOCK - 1) / BLOCK);
        double mass = 0;
        for (int64_t start = 0; start < size; start += BLOCK) {
            until.push_back(mass += mass_of_block(start));
        }
        const double goal = uniform * mass;
        auto block = std::upper_bound(until.begin(), until.end(), goal);
        // Just below 1, the product can round to the whole: the last block with mass is meant.
        if (block == until.end()) block = std::lower_bound(until.begin(), until.end(), mass);
        if (block == until.end()) return 0;  // no numbers
        const double before = block == until.begin() ? 0 : block[-1];
        return within((block - until.begin()) * BLOCK, before, goal);
    }

    int64_t within(int64_t start, double mass, double goal) const {
        int64_t last = start;  // with mass: sums in another order may fall short of the block's
        for (int64_t place = start; place < std::min(start + BLOCK, size); place += 16) {
            alignas(64) float found[16];
            _mm512_store_ps(found, masses(place));
            for (int64_t i = 0; i < 16; ++i) {
                if (found[i] == 0) continue;
                last = place + i;
                mass += found[i];
                if (mass > goal) return last;
            }
        }
        return last;
    }
};
}  // namespace
#endif

extern "C"
{{kernel.def_kernel(
    inputs={"logits": logits, "temperature": temperature, "uniform": uniform},
    outputs={"tokens": tokens})}}
{
    {{kernel.maybe_codegen_profile("draw")}}
    const int64_t rows = {{kernel.size(logits, 0)}}, size = {{kernel.size(logits, 1)}};
    #pragma omp parallel for num_threads({{num_threads}}) schedule(static) if(rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const Row row(logits + r * size, size, *temperature);
        tokens[r] = row.draw(uniform[r]);
    }
}
"""

    def render(self, **given: Any) -> str:
        """The source for the inputs at hand; nothing is fused behind it."""
        assert not given.get("epilogue_nodes")
        logits, temperature, uniform = self.input_nodes
        options = {
            "template": self,
            "kernel": given["kernel"],
            "logits": logits,
            "temperature": temperature,
            "uniform": uniform,
            "tokens": given.get("template_buffer_node") or self.output_node,
            "num_threads": self.num_threads,
        }
        return self._template_from_string(self.SOURCE).render(**options)


@register_lowering(torch.ops.drafthead.draw.default, type_promotion_kind=None)
def _lower(logits: Any, temperature: Any, uniform: Any) -> Any:
    """The operation in the code generator's graph."""
    *outer, size = logits.get_size()
    view = lowerings[torch.ops.aten.view.default]
    inputs = [
        ir.ExternKernel.require_contiguous(view(x, shape))
        for x, shape in (
            (logits, [prod(outer), size]),
            (temperature, [1]),
            (uniform, [prod(outer)]),
        )
    ]
    layout = ir.FixedLayout(logits.get_device(), torch.int64, [prod(outer)], [1])
    template = DrawTemplate("draw", inputs, layout, parallel_num_threads())
    return view(template.generate().output_node(), outer)
