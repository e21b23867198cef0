#ifndef DRAFTHEAD_ATTENTION_ROWS
#define DRAFTHEAD_ATTENTION_ROWS
#include "numbers.h"
#include "queries.h"
#include "scores.h"
#include <vector>

namespace {
constexpr int MIXED = 4;  // rows whose sums of 64 values do

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

// Adds up numbers that come sixteen at a time, of which some are left out: those that are not go to
// sums 0, 1, ... 15, 0, ... in turn, wherever they were among the sixteen.
struct SumInTurn {
    __m512 sums = _mm512_setzero_ps();
    __m512 waiting = _mm512_setzero_ps();  // the first `count` of the next sixteen, then zeros
    int count = 0;

    void add(__m512 numbers, __mmask16 some) {
        if (some == 0xffff && count == 0) {
            sums = _mm512_add_ps(sums, numbers);
            return;
        }
        // Number i goes to place count + i, or around the end to the next sixteen.
        const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                                 15);
        const __m512 close = _mm512_maskz_compress_ps(some, numbers);
        const __m512i from = _mm512_sub_epi32(places, _mm512_set1_epi32(count));
        const __m512 turned = _mm512_permutexvar_ps(from, close);
        waiting = _mm512_mask_mov_ps(turned, first(count), waiting);
        count += __builtin_popcount(some);
        if (count >= 16) {
            sums = _mm512_add_ps(sums, waiting);
            count -= 16;
            waiting = _mm512_maskz_mov_ps(first(count), turned);
        }
    }

    float total() const { return _mm512_reduce_add_ps(_mm512_add_ps(sums, waiting)); }
};

// Puts bfloat16(exp(scores + mask - max)) into the first half of scores' memory, 0 after `columns`,
// and of each pair of columns the second weight first, see `mix`; returns the sum of the weights, not
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
        const auto rounded = (__m256i)_mm512_cvtneps_pbh(weight);
        _mm256_storeu_si256((__m256i*)(reinterpret_cast<at::BFloat16*>(scores) + s),
                            _mm256_rol_epi32(rounded, 16));
    }
    return sum.total();
}

// output[r] = sum_s weights[r][s] values[s] / sums[r], two columns s at a time. The processor adds
// the second product of a pair first, and rounds after each: pairs are stored the other way round, so
// that the columns are added in their order, and those of weight 0 change nothing.
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
            v[2 * p] = (__m512bh)_mm512_unpacklo_epi16(b, a);
            v[2 * p + 1] = (__m512bh)_mm512_unpackhi_epi16(b, a);
        });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto pair = reinterpret_cast<const int32_t*>(weights + r * width)[s / 2];
            auto repeated = (__m512bh)_mm512_set1_epi32(pair);
            c10::ForcedUnroll<PARTS>{}([&](auto p) INLINE {
                totals[r * PARTS + p] = _mm512_dpbf16_ps(totals[r * PARTS + p], repeated, v[p]);
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
            __m512i ordered = _mm512_permutex2var_epi64(low, order, high);
            _mm512_storeu_si512(output[r] + p * 32, ordered);
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
