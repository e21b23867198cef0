"""Attention of few queries over a long cache, for processors with AVX512-BF16.

torch's kernel for CPUs is made for blocks of queries: for a token tree it spends most of its time
on setting up small matrix products. Here one function, which torch's code generator compiles into
the graph of a pass, works through the queries of a head eight at a time::

    scores[r, s]  = scale * query[r] . key[s] + mask[r, s]     16 keys at once, pairs of values
    weights[r]    = exp(scores[r] - max_s scores[r, s])        float32
    output[r]     = sum_s weights[r, s] value[s] / sum_s weights[r, s]

A query's sums are taken in the order of the columns and do not depend on the other queries.
"""

from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import register_lowering
from torch._inductor.utils import parallel_num_threads
from torch.nn import functional

ROWS = 8  # queries of one head that are worked on together

WITH_ROWS = r"""
#ifndef DRAFTHEAD_WITH_ROWS  // one file may hold several kernels
#define DRAFTHEAD_WITH_ROWS
namespace {
// f(number of rows as a constant), for 1 to MOST rows
template <int MOST, typename F>
inline void with_rows(int64_t rows, const F& f) {
    if constexpr (MOST > 0) {
        if (rows == MOST) f(std::integral_constant<int, MOST>{});
        else with_rows<MOST - 1>(rows, f);
    }
}
}  // namespace
#endif
"""


@torch.library.custom_op("drafthead::attend", mutates_args=())
def attend(
    query: torch.Tensor,  # [B, H, T, D]
    key: torch.Tensor,  # [B, G, S, D], H a multiple of G
    value: torch.Tensor,  # [B, G, S, D]
    mask: torch.Tensor,  # [B or 1, H or 1, T, S] added to the scores
    scale: float,
) -> torch.Tensor:
    """softmax(scale query key^T + mask) value [B, H, T, D], laid out as [B, T, H, D]."""
    output = functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@attend.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    batch, heads, tokens, size = query.shape
    return query.new_empty(batch, tokens, heads, size).transpose(1, 2)


@register_lowering(torch.ops.drafthead.attend.default, type_promotion_kind=None)
def _lower(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    """The operation in the code generator's graph: a call of the function below."""
    query = ir.ExternKernel.require_contiguous(query)
    nodes = [query, *map(ir.ExternKernel.realize_input, (key, value, mask))]
    batch, heads, tokens, size = query.get_size()
    strides = [tokens * heads * size, size, heads * size, 1]
    layout = ir.FixedLayout(
        query.get_device(), query.get_dtype(), [batch, heads, tokens, size], strides
    )
    template = AttendTemplate("attend", nodes, layout, parallel_num_threads())
    template.scale = scale
    return template.generate().output_node()


class AttendTemplate(CppTemplate):
    """The source of the function, for the code generator."""

    scale: float

    SOURCE = r"""
{{template.header().getvalue()}}
#include <vector>
{{with_rows}}
#ifndef DRAFTHEAD_ATTEND  // one file may hold this for inputs of several layouts
#define DRAFTHEAD_ATTEND
namespace {
#define INLINE __attribute__((always_inline))

// out[pair][key] of 16 keys: pairs of values, 16 pairs at a time, columns of 16 keys.
template <int D>
inline void transpose_keys(const at::BFloat16* keys, int64_t stride, int count, float* out) {
    for (int block = 0; block < D / 32; ++block) {
        auto from = reinterpret_cast<const float*>(keys) + block * 16;
        if (count == 16) {
            at::vec::transpose_mxn<float, 16, 16>(from, stride / 2, out + block * 256, 16);
        } else {
            at::vec::transpose_mxn<float>(from, stride / 2, out + block * 256, 16, count, 16);
        }
    }
}

// scores[r][0..15] = scale * query[r] . key[0..15]
template <int D, int R>
inline void score(const at::BFloat16* query, int64_t stride, const float* keys, float scale,
                  float* scores, int64_t width) {
    __m512 sums[R];
    c10::ForcedUnroll<R>{}([&](auto r) INLINE { sums[r] = _mm512_setzero_ps(); });
    for (int pair = 0; pair < D / 2; ++pair) {
        __m512bh k = (__m512bh)_mm512_loadu_ps(keys + pair * 16);
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto both = reinterpret_cast<const int32_t*>(query + r * stride)[pair];
            sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)_mm512_set1_epi32(both), k);
        });
    }
    c10::ForcedUnroll<R>{}([&](auto r) INLINE {
        _mm512_storeu_ps(scores + r * width, _mm512_mul_ps(sums[r], _mm512_set1_ps(scale)));
    });
}

inline __m512 widen(const at::BFloat16* from) {
    auto half = _mm256_loadu_si256((const __m256i*)from);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline __m512 widen(const float* from) { return _mm512_loadu_ps(from); }

// scores + mask -> exp(. - max), and its sum; columns from `columns` to `width` become 0.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns, int64_t width) {
    using Vec = at::vec::Vectorized<float>;
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    Vec tops(nothing);
    int64_t s = 0;
    for (; s + 16 <= columns; s += 16) {
        Vec score = Vec::loadu(scores + s) + Vec(widen(mask + s));
        score.store(scores + s);
        tops = at::vec::maximum(tops, score);
    }
    float top = at::vec::vec_reduce_all<float>(
        [](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, tops);
    for (; s < width; ++s) {
        scores[s] = s < columns ? scores[s] + static_cast<float>(mask[s]) : nothing;
        top = std::max(top, scores[s]);
    }
    Vec sum(0.0f);
    for (s = 0; s < width; s += 16) {
        Vec weight = (Vec::loadu(scores + s) - Vec(top)).exp();
        weight.store(scores + s);
        sum = sum + weight;
    }
    return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum);
}

// output[r] = sum_s weights[r][s] values[s] / sums[r]
template <int D, int R>
inline void mix(const float* weights, int64_t width, const at::BFloat16* values, int64_t stride,
                int64_t columns, const float* sums, at::BFloat16* output, int64_t out_stride) {
    constexpr int COLS = D / 16;
    __m512 totals[R * COLS];
    c10::ForcedUnroll<R * COLS>{}([&](auto i) INLINE { totals[i] = _mm512_setzero_ps(); });
    __m512 v[COLS];
    for (int64_t s = 0; s < columns; ++s) {
        c10::ForcedUnroll<COLS>{}([&](auto c) INLINE {
            v[c] = widen(values + s * stride + c * 16);
        });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            __m512 weight = _mm512_set1_ps(weights[r * width + s]);
            c10::ForcedUnroll<COLS>{}([&](auto c) INLINE {
                totals[r * COLS + c] = _mm512_fmadd_ps(weight, v[c], totals[r * COLS + c]);
            });
        });
    }
    c10::ForcedUnroll<R>{}([&](auto r) INLINE {
        __m512 share = _mm512_set1_ps(1.0f / sums[r]);
        c10::ForcedUnroll<COLS>{}([&](auto c) INLINE {
            auto half = _mm512_cvtneps_pbh(_mm512_mul_ps(totals[r * COLS + c], share));
            _mm256_storeu_si256((__m256i*)(output + r * out_stride + c * 16), (__m256i)half);
        });
    });
}

#undef INLINE

// Distances of rows, heads and tokens or keys; the values of one are next to each other.
struct Steps { int64_t b, h, t; };

template <int D, typename mask_t>
void attend(const at::BFloat16* query, Steps q, const at::BFloat16* key, Steps k,
            const at::BFloat16* value, Steps v, const mask_t* mask, Steps m,
            at::BFloat16* output, Steps o, int64_t batch, int64_t heads, int64_t kv_heads,
            int64_t tokens, int64_t columns, float scale, int threads) {
    constexpr int ROWS = {{rows}};
    // Rows whose outputs fit into 16 registers.
    constexpr int MIXED = std::max(1, std::min(ROWS, 256 / D));
    const int64_t width = (columns + 15) / 16 * 16, blocks = (tokens + ROWS - 1) / ROWS;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < batch * heads * blocks; ++task) {
        static thread_local std::vector<float> memory;
        memory.resize(ROWS * width + 16 * D / 2);
        float* scores = memory.data();
        float* turned = scores + ROWS * width;
        const int64_t b = task / (heads * blocks), h = task / blocks % heads;
        const int64_t first = task % blocks * ROWS, rows = std::min<int64_t>(ROWS, tokens - first);
        const int64_t kv_head = h / (heads / kv_heads);
        const auto* queries = query + b * q.b + h * q.h + first * q.t;
        const auto* keys = key + b * k.b + kv_head * k.h;
        const auto* values = value + b * v.b + kv_head * v.h;
        for (int64_t s = 0; s < columns; s += 16) {
            int count = std::min<int64_t>(16, columns - s);
            for (int i = 0; i < count; ++i) {
                for (int d = 0; d < D; d += 32) {  // what is needed next, a cache line at a time
                    _mm_prefetch((const char*)(values + (s + i) * v.t + d), _MM_HINT_T1);
                }
            }
            transpose_keys<D>(keys + s * k.t, k.t, count, turned);
            with_rows<ROWS>(rows, [&](auto r) {
                score<D, r()>(queries, q.t, turned, scale, scores + s, width);
            });
        }
        float sums[ROWS];
        for (int64_t r = 0; r < rows; ++r) {
            sums[r] = weigh(scores + r * width, mask + b * m.b + h * m.h + (first + r) * m.t,
                            columns, width);
        }
        auto* outputs = output + b * o.b + h * o.h + first * o.t;
        for (int64_t r = 0; r < rows; r += MIXED) {
            with_rows<MIXED>(std::min<int64_t>(MIXED, rows - r), [&](auto n) {
                mix<D, n()>(scores + r * width, width, values, v.t, columns, sums + r,
                            outputs + r * o.t, o.t);
            });
        }
    }
}
}  // namespace
#endif

extern "C"
{{kernel.def_kernel(inputs={"query": query, "key": key, "value": value, "mask": mask},
                    outputs={"output": output})}}
{
    {{kernel.maybe_codegen_profile("attend")}}
{%- macro start(x) %}&{{kernel.index(x, [0, 0, 0, 0])}}{% endmacro %}
{%- macro steps(x, b, h) %}
{%- set rows = kernel.stride(x, 0) if b else 0 %}{% set heads = kernel.stride(x, 1) if h else 0 %}
Steps{ {{rows}}, {{heads}}, {{kernel.stride(x, 2)}} }
{%- endmacro %}
    attend<{{kernel.size(query, 3)}}>(
        {{start(query)}}, {{steps(query, true, true)}},
        {{start(key)}}, {{steps(key, true, true)}},
        {{start(value)}}, {{steps(value, true, true)}},
        {{start(mask)}}, {{steps(mask, mask_rows, mask_heads)}},
        {{start(output)}}, {{steps(output, true, true)}},
        {{kernel.size(query, 0)}}, {{kernel.size(query, 1)}}, {{kernel.size(key, 1)}},
        {{kernel.size(query, 2)}}, {{kernel.size(key, 2)}}, {{scale}}, {{num_threads}});
}
"""

    def render(self, **given: Any) -> str:
        """The source for the inputs at hand; nothing is fused behind it."""
        assert not given.get("epilogue_nodes")
        kernel = given["kernel"]
        query, key, value, mask = self.input_nodes
        batch, heads = mask.get_size()[:2]
        options = {
            "template": self,
            "kernel": kernel,
            "query": query,
            "key": key,
            "value": value,
            "mask": mask,
            "mask_rows": batch != 1,
            "mask_heads": heads != 1,
            "output": given.get("template_buffer_node") or self.output_node,
            "scale": self.scale,
            "rows": ROWS,
            "with_rows": WITH_ROWS,
            "num_threads": self.num_threads,
        }
        return self._template_from_string(self.SOURCE).render(**options)
