#ifndef DRAFTHEAD_ATTENTION_ROWS
#define DRAFTHEAD_ATTENTION_ROWS
#include "numbers.h"
#include <vector>

namespace {
constexpr int MOST_QUERIES = 16;  // of one head of keys, worked on together
}
#include "queries.h"

namespace {
constexpr int KEYS = 4;  // multiplied at once
constexpr int SCORED = 2;  // rows whose sums over the values of KEYS keys fit into registers
constexpr int MIXED = 3;  // rows whose sums of 32 values do

// scores[r][0 .. KEYS - 1] = scale * query[r] . key
template <int D, int R>
inline void score(const float* query, const at::BFloat16* const* keys, float scale, float* scores,
                  int64_t width) {
    __m256 sums[R * KEYS];
    c10::ForcedUnroll<R * KEYS>{}([&](auto i) INLINE { sums[i] = _mm256_setzero_ps(); });
    for (int part = 0; part < D; part += 8) {
        c10::ForcedUnroll<KEYS>{}([&](auto key) INLINE {
            const __m256 values = load(keys[key] + part);
            c10::ForcedUnroll<R>{}([&](auto r) INLINE {
                const __m256 q = _mm256_loadu_ps(query + r * D + part);
                sums[r * KEYS + key] = _mm256_fmadd_ps(q, values, sums[r * KEYS + key]);
            });
        });
    }
    c10::ForcedUnroll<R>{}([&](auto r) INLINE {
        const __m256* four = sums + r * KEYS;
        const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(four[0], four[1]),
                                             _mm256_hadd_ps(four[2], four[3]));
        const __m128 whole = _mm_add_ps(_mm256_castps256_ps128(halves),
                                        _mm256_extractf128_ps(halves, 1));
        _mm_storeu_ps(scores + r * width, _mm_mul_ps(whole, _mm_set1_ps(scale)));
    });
}

// Adds up numbers that come eight at a time, of which some are left out: those that are not go to
// sums 0, 1, ... 7, 0, ... in turn, wherever they were among the eight.
struct SumInTurn {
    alignas(32) float sums[8] = {};
    int count = 0;  // the next number's place

    void add(const float* numbers, int some) {
        if (some == 0xff && count == 0) {
            _mm256_store_ps(sums, _mm256_add_ps(_mm256_load_ps(sums), _mm256_loadu_ps(numbers)));
            return;
        }
        for (; some; some &= some - 1) {
            sums[count] += numbers[__builtin_ctz(some)];
            count = (count + 1) % 8;
        }
    }
};

// scores = exp(scores + mask - max), 0 after `columns`; returns their sum.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    const int64_t width = (columns + 7) / 8 * 8;
    std::fill(scores + columns, scores + width, NOTHING);
    __m256 tops = _mm256_set1_ps(NOTHING);
    for (int64_t s = 0; s < width; s += 8) {
        const __m256 masked = _mm256_add_ps(_mm256_loadu_ps(scores + s),
                                            load(mask + s, columns - s));
        _mm256_storeu_ps(scores + s, masked);
        tops = _mm256_max_ps(tops, masked);
    }
    const __m256 top = _mm256_set1_ps(max_of(tops));
    SumInTurn sum;
    for (int64_t s = 0; s < width; s += 8) {
        const __m256 below = _mm256_sub_ps(_mm256_loadu_ps(scores + s), top);
        _mm256_storeu_ps(scores + s, exp_of(below));
        const __m256 seen = _mm256_cmp_ps(below, _mm256_set1_ps(HIDDEN), _CMP_NLE_UQ);
        sum.add(scores + s, _mm256_movemask_ps(seen));
    }
    return sum_of(_mm256_load_ps(sum.sums));
}

// output[r] = sum_s weights[r][s] values[s] / sums[r], 32 values at a time
template <int D, int R>
inline void mix(const float* weights, int64_t width, const at::BFloat16* values, int64_t stride,
                int64_t columns, const float* sums, at::BFloat16* const* output) {
    for (int part = 0; part < D; part += 32) {
        __m256 totals[R * 4];
        c10::ForcedUnroll<R * 4>{}([&](auto i) INLINE { totals[i] = _mm256_setzero_ps(); });
        for (int64_t s = 0; s < columns; ++s) {
            const auto* column = values + s * stride + part;
            c10::ForcedUnroll<4>{}([&](auto p) INLINE {
                const __m256 eight = load(column + p * 8);
                c10::ForcedUnroll<R>{}([&](auto r) INLINE {
                    const __m256 weight = _mm256_broadcast_ss(weights + r * width + s);
                    totals[r * 4 + p] = _mm256_fmadd_ps(weight, eight, totals[r * 4 + p]);
                });
            });
        }
        c10::ForcedUnroll<R * 4>{}([&](auto i) INLINE {
            const __m256 share = _mm256_set1_ps(1.0f / sums[i / 4]);
            store(_mm256_mul_ps(totals[i], share), output[i / 4] + part + i % 4 * 8);
        });
    }
}

// Attention of up to MOST_QUERIES rows to one head of keys and values.
template <int D, typename mask_t>
void attend_rows(const Queries<D, mask_t>& of, int64_t rows, const at::BFloat16* keys,
                 int64_t key_stride, const at::BFloat16* values, int64_t value_stride,
                 int64_t columns, float scale) {
    const int64_t width = (columns + 7) / 8 * 8;
    static thread_local std::vector<float> memory;
    memory.resize(MOST_QUERIES * width);
    float* scores = memory.data();
    for (int64_t s = 0; s < columns; s += KEYS) {
        const at::BFloat16* some[KEYS];  // where there are fewer, the last one again
        for (int64_t i = 0; i < KEYS; ++i) {
            some[i] = keys + std::min(s + i, columns - 1) * key_stride;
        }
        in_groups<SCORED>(rows, [&](int64_t r, auto count) {
            score<D, count()>(of.query + r * D, some, scale, scores + r * width + s, width);
        });
    }
    float sums[MOST_QUERIES];
    for (int64_t r = 0; r < rows; ++r) sums[r] = weigh(scores + r * width, of.mask[r], columns);
    in_groups<MIXED>(rows, [&](int64_t r, auto count) {
        mix<D, count()>(scores + r * width, width, values, value_stride, columns, sums + r,
                        of.output + r);
    });
}
}  // namespace
#endif
