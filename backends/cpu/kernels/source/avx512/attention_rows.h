#ifndef DRAFTHEAD_ATTENTION_ROWS
#define DRAFTHEAD_ATTENTION_ROWS
#include "attention_parts.h"
#include "scores.h"
#include <vector>

namespace {
constexpr int MOST_QUERIES = 16;  // of one head of keys, worked on together
}
#include "queries.h"

namespace {
constexpr int MIXED = 4;  // rows whose sums of 64 values do

// Puts exp(scores + mask - max) as numbers into the beginning of scores' memory, 0 after `columns`, and
// of each pair of columns the second weight first, see `mix`; returns the sum of the weights, not
// rounded.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns) {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 tops = nothing;
    for (int64_t s = 0; s < columns; s += 16) {
        const auto some = first(columns - s);
        __m512 masked = _mm512_loadu_ps(scores + s);
        masked = _mm512_mask_add_ps(nothing, some, masked, load(mask + s, some));
        _mm512_storeu_ps(scores + s, masked);
        tops = _mm512_max_ps(tops, masked);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(tops));
    SumInTurn sum;
    for (int64_t s = 0; s < columns; s += 16) {
        at::vec::Vectorized<float> below(_mm512_sub_ps(_mm512_loadu_ps(scores + s), top));
        __m512 weight = below.exp_u20();
        sum.add(weight, _mm512_cmp_ps_mask(below, _mm512_set1_ps(HIDDEN), _CMP_NLE_UQ));
        store_swapped(weight, reinterpret_cast<number_t*>(scores) + s);
    }
    return sum.total();
}

// output[r] = sum_s weights[r][s] values[s] / sums[r], two columns s at a time. The second product of
// a pair is added first, and rounded each time: pairs are stored the other way round, so that the columns
// are added in their order, and those of weight 0 change nothing.
template <int D, int R>
inline void mix(const float* weights, int64_t width, const at::BFloat16* values, int64_t stride,
                int64_t columns, const float* sums, at::BFloat16* const* output) {
    constexpr int PARTS = D / 16;
    __m512 totals[R * PARTS];
    c10::ForcedUnroll<R * PARTS>{}([&](auto i) INLINE { totals[i] = _mm512_setzero_ps(); });
    for (int64_t s = 0; s < columns; s += 2) {
        const auto* one = values + s * stride;
        const auto* two = s + 1 < columns ? one + stride : one;  // or any, of weight 0
        c10::ForcedUnroll<PARTS / 2>{}([&](auto p) INLINE {
            __m512i a = _mm512_loadu_si512(one + p * 32), b = _mm512_loadu_si512(two + p * 32);
            const Pairs low(_mm512_unpacklo_epi16(b, a)), high(_mm512_unpackhi_epi16(b, a));
            c10::ForcedUnroll<R>{}([&](auto r) INLINE {
                const Two pair(reinterpret_cast<const number_t*>(weights + r * width) + s);
                __m512* its = totals + r * PARTS + 2 * p;
                its[0] = add_products(its[0], pair, low);
                its[1] = add_products(its[1], pair, high);
            });
        });
    }
    c10::ForcedUnroll<R>{}([&](auto r) INLINE {
        c10::ForcedUnroll<PARTS / 2>{}([&](auto p) INLINE {
            const __m512* two = totals + r * PARTS + 2 * p;
            store_shares(two[0], two[1], 1.0f / sums[r], output[r] + p * 32);
        });
    });
}

// Attention of up to MOST_QUERIES rows to one head of keys and values.
template <int D, typename mask_t>
void attend_rows(const Queries<D, mask_t>& of, int64_t rows, const at::BFloat16* keys,
                 int64_t key_stride, const at::BFloat16* values, int64_t value_stride,
                 int64_t columns, float scale) {
    constexpr int MIXED_ROWS = std::max(1, std::min(2 * MIXED, MIXED * 64 / D));
    const int64_t width = (columns + 15) / 16 * 16;
    static thread_local std::vector<float> memory;
    memory.resize(MOST_QUERIES * width);
    float* scores = memory.data();
    for (int64_t start = 0; start < columns; start += 16 * KEY_BLOCKS) {
        __m512i turned[KEY_BLOCKS * D / 2];
        int blocks = 0;
        for (int64_t s = start; blocks < KEY_BLOCKS && s < columns; ++blocks, s += 16) {
            const int count = std::min<int64_t>(16, columns - s);
            for (int i = 0; i < count; ++i) {
                for (int d = 0; d < D; d += 32) {  // what is needed next, a cache line at a time
                    _mm_prefetch((const char*)(values + (s + i) * value_stride + d), _MM_HINT_T1);
                }
            }
            turn_keys<D>(keys + s * key_stride, key_stride, count, turned + blocks * D / 2);
        }
        score_rows<D>(of.query, rows, turned, blocks, scale, scores + start, width);
    }
    float sums[MOST_QUERIES];
    for (int64_t r = 0; r < rows; ++r) {
        sums[r] = weigh(scores + r * width, of.mask[r], columns);
    }
    in_groups<MIXED_ROWS>(rows, [&](int64_t r, auto count) {
        mix<D, count()>(scores + r * width, width, values, value_stride, columns, sums + r,
                        of.output + r);
    });
}
}  // namespace
#endif
