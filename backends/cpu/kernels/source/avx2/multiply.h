// Products of few rows with blocks of packed weights, in bfloat16.
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "bfloat16_rows.h"

namespace {
// Sums of 6 rows and 16 columns, or of 2 rows and 32 columns, fill at most 12 of the 16 registers.
constexpr int MOST_ROWS = 6, GROUP_ROWS = 6;

// How far before they are needed `values` weights are fetched: they are read twice, so all of them.
inline int64_t distance_of(int64_t values) { return values; }

// Of eight columns the first (PLACE 0) or second value of a pair, as they are packed.
template <int PLACE>
inline __m256 half_of(const at::BFloat16* from) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
    return _mm256_castsi256_ps(PLACE ? _mm256_and_si256(both, upper) : _mm256_slli_epi32(both, 16));
}

// out[r][first .. first + 8 C - 1] = x[r] . block + bias, of which the first `columns` are stored.
template <int R, int C>
inline void multiply_columns(int first, const float* x, int64_t inner, const at::BFloat16* block,
                             const at::BFloat16* bias, at::BFloat16* out, int64_t size,
                             int columns, Ahead ahead) {
    auto bias_of = [&](int c) INLINE {
        return bias ? load(bias + c * 8, columns - c * 8) : _mm256_setzero_ps();
    };
    __m256 sums[R * C];
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE { sums[i] = bias_of(first / 8 + i % C); });
    // In this order weights of two registers are all that is kept beside the sums.
    auto half = [&](int64_t k, int start, auto place) INLINE {
        __m256 w[2];
        c10::ForcedUnroll<2>{}([&](auto c) INLINE {
            w[c] = half_of<place()>(block + k * 32 + first * 2 + (start + c) * 16);
        });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const __m256 value = _mm256_broadcast_ss(x + r * inner + k + place);
            c10::ForcedUnroll<2>{}([&](auto c) INLINE {
                __m256& sum = sums[r * C + start + c];
                sum = _mm256_fmadd_ps(w[c], value, sum);
            });
        });
    };
    auto pair = [&](int64_t k) INLINE {
        c10::ForcedUnroll<C / 2>{}([&](auto two) INLINE {
            half(k, 2 * two, std::integral_constant<int, 0>{});
            half(k, 2 * two, std::integral_constant<int, 1>{});
        });
    };
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8) {
        for (int line = 0; line < ahead.lines; ++line, ahead.start += 32) {
            _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
        }
        pair(k);
        pair(k + 2);
        pair(k + 4);
        pair(k + 6);
    }
    for (; k < inner; k += 2) {
        pair(k);
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
        const int column = first + i % C * 8;
        store(sums[i], out + i / C * size + column, columns - column);
    });
}

// f(first column, C, what to fetch) for each 8 C of 32 columns that R rows are multiplied with together
template <int R, typename F>
inline void in_parts(int64_t inner, Ahead ahead, const F& f) {
    constexpr int C = R <= 2 ? 4 : 2;
    for (int first = 0; first < 32; first += 8 * C) {
        const int left = (32 - first) / (8 * C);  // times, each of which fetches its share
        const Ahead now{ahead.start, (ahead.lines + left - 1) / left};
        f(first, std::integral_constant<int, C>{}, now);
        ahead = {now.after(inner).start, ahead.lines - now.lines};
    }
}

// out[r][0..31] = x[row + r] . block + bias for R rows, of which the first `columns` are stored.
template <int R>
inline void multiply(std::integral_constant<int, R>, const Bfloat16Rows& rows, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    in_parts<R>(rows.inner, ahead, [&](int first, auto C, Ahead now) {
        multiply_columns<R, C()>(first, rows.x + row * rows.inner, rows.inner, block, bias, out, size,
                                 columns, now);
    });
}
}  // namespace
#endif
