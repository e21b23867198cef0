"""Attention of few queries over a long cache, for processors with AVX512-BF16.

torch's kernel for CPUs is made for blocks of queries: for a token tree it spends most of its time
on setting up small matrix products. Here one function, which torch's code generator compiles into
the graph of a pass, works through the queries that share a head of keys sixteen at a time::

    scores[r, s]  = scale * query[r] . key[s] + mask[r, s]     16 keys at once, pairs of values
    weights[r]    = exp(scores[r] - max_s scores[r, s])        float32
    output[r]     = sum_s bfloat16(weights[r, s]) value[s] / sum_s weights[r, s]

As in torch's kernel, weights are rounded to bfloat16 before they are multiplied with the values. A
query's sums are taken in the order of the columns and do not depend on the other queries.
"""

from typing import Any

import torch
import torch._inductor.lowering  # first: the parts of the code generator import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.lowering import register_lowering
from torch._inductor.utils import parallel_num_threads
from torch.nn import functional

ROWS = 16  # queries of one head of keys that are worked on together
SCORED, MIXED = 8, 4  # of which sums of scores, or of 64 values each, fit into registers
KEYS = 4  # blocks of 16 keys that are turned around before they are multiplied

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

// f(first row, number of rows as a constant) for groups of at most MOST rows, all of nearly the
// same size: 13 rows in groups of at most 8 are 7 and 6.
template <int MOST, typename F>
inline void in_groups(int64_t rows, const F& f) {
    const int64_t groups = (rows + MOST - 1) / MOST, group = (rows + groups - 1) / groups;
    for (int64_t r = 0; r < rows; r += group) {
        with_rows<MOST>(std::min(group, rows - r), [&](auto count) { f(r, count); });
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
#include <cstring>
#include <vector>
{{with_rows}}
#ifndef DRAFTHEAD_ATTEND  // one file may hold this for inputs of several layouts
#define DRAFTHEAD_ATTEND
namespace {
#define INLINE __attribute__((always_inline))

// out[pair][key]: pairs of values of 16 keys; where there are fewer, the last one again.
template <int D>
inline void turn_keys(const at::BFloat16* keys, int64_t stride, int count, __m512i* out) {
    const at::BFloat16* rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = keys + std::min(i, count - 1) * stride;
    for (int part = 0; part < D; part += 8, out += 4) {
        auto at = [&](int i) INLINE { return _mm_loadu_si128((const __m128i*)(rows[i] + part)); };
        __m512i v[4];  // v[i]: the part of keys i, i + 4, i + 8, i + 12
        c10::ForcedUnroll<4>{}([&](auto i) INLINE {
            v[i] = _mm512_broadcast_i32x4(at(i));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00f0, at(i + 4));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0f00, at(i + 8));
            v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xf000, at(i + 12));
        });
        __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        out[0] = _mm512_unpacklo_epi64(a, c);
        out[1] = _mm512_unpackhi_epi64(a, c);
        out[2] = _mm512_unpacklo_epi64(b, d);
        out[3] = _mm512_unpackhi_epi64(b, d);
    }
}

// scores[r][0 .. 16 B - 1] = scale * query[r] . key, for B blocks of turned keys
template <int D, int R, int B>
inline void score(const at::BFloat16* query, const __m512i* keys, float scale, float* scores,
                  int64_t width) {
    __m512 sums[R * B];
    c10::ForcedUnroll<R * B>{}([&](auto i) INLINE { sums[i] = _mm512_setzero_ps(); });
    for (int pair = 0; pair < D / 2; ++pair) {
        __m512bh k[B];
        c10::ForcedUnroll<B>{}([&](auto b) INLINE { k[b] = (__m512bh)keys[b * D / 2 + pair]; });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto both = reinterpret_cast<const int32_t*>(query + r * D)[pair];
            auto q = (__m512bh)_mm512_set1_epi32(both);
            c10::ForcedUnroll<B>{}([&](auto b) INLINE {
                sums[r * B + b] = _mm512_dpbf16_ps(sums[r * B + b], q, k[b]);
            });
        });
    }
    c10::ForcedUnroll<R * B>{}([&](auto i) INLINE {
        __m512 scaled = _mm512_mul_ps(sums[i], _mm512_set1_ps(scale));
        _mm512_storeu_ps(scores + i / B * width + i % B * 16, scaled);
    });
}

inline __m512 widen(__mmask16 some, const at::BFloat16* from) {
    auto half = _mm256_maskz_loadu_epi16(some, from);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

inline __m512 widen(__mmask16 some, const float* from) {
    return _mm512_maskz_loadu_ps(some, from);
}

// Puts bfloat16(exp(scores + mask - max)) into the first half of scores' memory, 0 behind
// `columns`; returns the sum of the weights, not rounded.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns) {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 tops = nothing;
    for (int64_t s = 0; s < columns; s += 16) {
        auto some = (__mmask16)((1u << std::min<int64_t>(16, columns - s)) - 1);
        __m512 found = _mm512_loadu_ps(scores + s);
        found = _mm512_mask_add_ps(nothing, some, found, widen(some, mask + s));
        _mm512_storeu_ps(scores + s, found);
        tops = _mm512_max_ps(tops, found);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(tops));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t s = 0; s < columns; s += 16) {
        at::vec::Vectorized<float> below(_mm512_sub_ps(_mm512_loadu_ps(scores + s), top));
        __m512 weight = below.exp_u20();
        sum = _mm512_add_ps(sum, weight);
        auto half = (__m256i)_mm512_cvtneps_pbh(weight);
        _mm256_storeu_si256((__m256i*)(reinterpret_cast<at::BFloat16*>(scores) + s), half);
    }
    return _mm512_reduce_add_ps(sum);
}

// output[r] = sum_s weights[r][s] values[s] / sums[r], two columns s at a time
template <int D, int R>
inline void mix(const float* weights, int64_t width, const at::BFloat16* values, int64_t stride,
                int64_t columns, const float* sums, at::BFloat16* const* output) {
    constexpr int PARTS = D / 16;
    __m512 totals[R * PARTS];
    c10::ForcedUnroll<R * PARTS>{}([&](auto i) INLINE { totals[i] = _mm512_setzero_ps(); });
    for (int64_t s = 0; s < columns; s += 2) {
        const auto* one = values + s * stride;
        const auto* two = s + 1 < columns ? one + stride : one;  // or any, of weight 0
        __m512bh v[PARTS];
        c10::ForcedUnroll<PARTS / 2>{}([&](auto p) INLINE {
            __m512i a = _mm512_loadu_si512(one + p * 32), b = _mm512_loadu_si512(two + p * 32);
            v[2 * p] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            v[2 * p + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto pair = reinterpret_cast<const int32_t*>(weights + r * width)[s / 2];
            auto both = (__m512bh)_mm512_set1_epi32(pair);
            c10::ForcedUnroll<PARTS>{}([&](auto p) INLINE {
                totals[r * PARTS + p] = _mm512_dpbf16_ps(totals[r * PARTS + p], both, v[p]);
            });
        });
    }
    // Unpacking has put values 0-3, 8-11, ... of 32 into one sum and 4-7, 12-15, ... into the next.
    const __m512i order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    c10::ForcedUnroll<R>{}([&](auto r) INLINE {
        const __m512 share = _mm512_set1_ps(1.0f / sums[r]);
        auto rounded = [&](__m512 total) INLINE {
            return _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(total, share)));
        };
        c10::ForcedUnroll<PARTS / 2>{}([&](auto p) INLINE {
            __m512i low = rounded(totals[r * PARTS + 2 * p]);
            __m512i high = rounded(totals[r * PARTS + 2 * p + 1]);
            __m512i both = _mm512_permutex2var_epi64(low, order, high);
            _mm512_storeu_si512(output[r] + p * 32, both);
        });
    });
}

// Queries that share a head of keys, their masks, and where their outputs go.
template <int D, typename mask_t>
struct Queries {
    alignas(64) at::BFloat16 query[{{rows}} * D];
    const mask_t* mask[{{rows}}];
    at::BFloat16* output[{{rows}}];
};

// Attention of up to {{rows}} rows to one head of keys and values.
template <int D, typename mask_t>
void attend_rows(const Queries<D, mask_t>& of, int64_t rows, const at::BFloat16* keys,
                 int64_t key_stride, const at::BFloat16* values, int64_t value_stride,
                 int64_t columns, float scale) {
    constexpr int KEYS = {{keys}}, MIXED = std::max(1, std::min({{scored}}, {{mixed}} * 64 / D));
    const int64_t width = (columns + 15) / 16 * 16;
    static thread_local std::vector<float> memory;
    memory.resize({{rows}} * width);
    float* scores = memory.data();
    for (int64_t start = 0; start < columns; start += 16 * KEYS) {
        __m512i turned[KEYS * D / 2];
        int blocks = 0;
        for (int64_t s = start; blocks < KEYS && s < columns; ++blocks, s += 16) {
            const int count = std::min<int64_t>(16, columns - s);
            for (int i = 0; i < count; ++i) {
                for (int d = 0; d < D; d += 32) {  // what is needed next, a cache line at a time
                    _mm_prefetch((const char*)(values + (s + i) * value_stride + d), _MM_HINT_T1);
                }
            }
            turn_keys<D>(keys + s * key_stride, key_stride, count, turned + blocks * D / 2);
        }
        in_groups<{{scored}}>(rows, [&](int64_t r, auto count) {
            // Few rows take more keys at once: sums that wait for each other take six cycles each.
            constexpr int R = count(), B = R <= {{scored}} / 2 ? KEYS : KEYS / 2;
            const auto* query = of.query + r * D;
            float* out = scores + r * width + start;
            int b = 0;
            for (; b + B <= blocks; b += B) {
                score<D, R, B>(query, turned + b * D / 2, scale, out + b * 16, width);
            }
            for (; b < blocks; ++b) {
                score<D, R, 1>(query, turned + b * D / 2, scale, out + b * 16, width);
            }
        });
    }
    float sums[{{rows}}];
    for (int64_t r = 0; r < rows; ++r) {
        sums[r] = weigh(scores + r * width, of.mask[r], columns);
    }
    in_groups<MIXED>(rows, [&](int64_t r, auto count) {
        mix<D, count()>(scores + r * width, width, values, value_stride, columns, sums + r,
                        of.output + r);
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
    const int64_t sharing = heads / kv_heads, queries = sharing * tokens;  // of a head of keys
    const int64_t blocks = (queries + ROWS - 1) / ROWS, tasks = batch * kv_heads * blocks;
    // Tasks that are left when all threads have as many are split: of 5 on 2 threads, the fifth.
    const int64_t whole = tasks / threads * threads, parts = (tasks - whole) * threads;
    #pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t item = 0; item < whole + parts; ++item) {
        const int64_t beyond = std::max<int64_t>(item - whole, 0);
        const int64_t task = item - beyond + beyond / threads;
        int64_t first = task % blocks * ROWS, rows = std::min<int64_t>(ROWS, queries - first);
        if (item >= whole) {
            const int64_t share = (rows + threads - 1) / threads, before = beyond % threads * share;
            first += before;
            rows = std::min(share, rows - before);
        }
        const int64_t b = task / (kv_heads * blocks), kv_head = task / blocks % kv_heads;
        Queries<D, mask_t> of;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t h = kv_head * sharing + (first + r) / tokens, t = (first + r) % tokens;
            std::memcpy(of.query + r * D, query + b * q.b + h * q.h + t * q.t, D * 2);
            of.mask[r] = mask + b * m.b + h * m.h + t * m.t;
            of.output[r] = output + b * o.b + h * o.h + t * o.t;
        }
        if (rows > 0) {  // else there are fewer than threads
            attend_rows<D>(of, rows, key + b * k.b + kv_head * k.h, k.t,
                           value + b * v.b + kv_head * v.h, v.t, columns, scale);
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
            "scored": SCORED,
            "mixed": MIXED,
            "keys": KEYS,
            "with_rows": WITH_ROWS,
            "num_threads": self.num_threads,
        }
        return self._template_from_string(self.SOURCE).render(**options)
