"""The first half of a gated MLP, silu(x gate^T) * (x up^T), of few bfloat16 rows.

As operations of their own silu and product touch little memory, but have the threads wait for each
other once more in every layer. Here each thread finishes the columns that it has multiplied. The
blocks of both weights lie one behind the other, in the order in which they are read.
"""

from typing import Any

import torch
from torch._inductor.lowering import register_lowering
from torch.nn import functional

from drafthead.heads.graphs.kernels.linear import FewRowsTemplate


@torch.library.custom_op("drafthead::gated", mutates_args=())
def gated(
    x: torch.Tensor,  # [..., K]
    packed: torch.Tensor,  # [2N / 32, K / 2, 32, 2], paired, from `linear.pack`
    size: int,  # N, a multiple of 32
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) [..., N]."""
    rows = packed.transpose(1, 2).flatten(2)  # [2N / 32, 32, K]
    gate, up = (functional.linear(x, rows[half::2].flatten(0, 1)) for half in range(2))
    return functional.silu(gate) * up


@gated.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, size: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size)


class GatedTemplate(FewRowsTemplate):
    """The source of the function; it rounds where the operations of their own would."""

    SOURCE = r"""
{{template.header().getvalue()}}
{{parts}}
#ifndef DRAFTHEAD_GATED  // one file may hold this for inputs of several sizes
#define DRAFTHEAD_GATED
namespace {
inline __m512 widened(const at::BFloat16* values) {
    auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

inline void store(__m512 values, at::BFloat16* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(values));
}

// out[0..15] = silu(gate) * up; gate is overwritten.
inline void silu_times(at::BFloat16* gate, const at::BFloat16* up, at::BFloat16* out) {
    using Vec = at::vec::Vectorized<float>;
    Vec x = widened(gate);
    store(x / (Vec(1) + x.neg().exp()), gate);
    store(_mm512_mul_ps(widened(gate), widened(up)), out);
}

void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < size; first += 32) {
        const auto* block = packed + 2 * first * inner;
        in_groups_ahead(rows, 64 * inner, [&](int64_t r, auto count, int64_t ahead) {
            at::BFloat16 gate[count() * 32], up[count() * 32];
            multiply<count()>(x + r * inner, inner, block, nullptr, gate, 32, 32, ahead);
            multiply<count()>(x + r * inner, inner, block + 32 * inner, nullptr, up, 32, 32, ahead);
            for (int i = 0; i < 2 * count(); ++i) {
                silu_times(gate + i * 16, up + i * 16,
                           out + (r + i / 2) * size + first + i % 2 * 16);
            }
        });
    }
}
}  // namespace
#endif

extern "C"
{{kernel.def_kernel(inputs=inputs, outputs={"output": output})}}
{
    {{kernel.maybe_codegen_profile("gated")}}
    gated(&{{kernel.index(x, [0, 0])}}, packed, output, {{kernel.size(x, 0)}},
          {{kernel.size(x, 1)}}, {{kernel.size(output, 1)}}, {{num_threads}});
}
"""


@register_lowering(torch.ops.drafthead.gated.default, type_promotion_kind=None)
def _lower(x: Any, packed: Any, size: int) -> Any:
    """The operation in the code generator's graph."""
    return GatedTemplate.call("gated", x, [packed], size)
