// Products of few rows with blocks of packed weights, in bfloat16 or in bytes. A block in bytes has
// the values v of 0 to 127 of 32 columns, then 32 scales in float32. A weight is scale * (v - ZERO).
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "numbers.h"
#include <vector>

namespace {
constexpr float ZERO = 64;
// Sums of 6 rows and 16 columns, or of 2 rows and 32 columns, fill at most 12 of the 16 registers.
constexpr int MOST_ROWS = 6, GROUP_ROWS = 6;

// How far before they are needed `values` weights are fetched: they are read twice, so all of them.
inline int64_t distance_of(int64_t values) { return values; }

// Rows of x [rows, inner] in float32 and, for blocks in bytes, their sums.
template <bool IN_BYTES>
struct Factors {
    float* x;
    int64_t inner;
    std::vector<float> sums;

    Factors(const at::BFloat16* from, int64_t rows, int64_t inner)
        : inner(inner), sums(IN_BYTES ? rows : 0) {
        static thread_local std::vector<float> memory;
        if (int64_t(memory.size()) < rows * inner) memory.resize(rows * inner);
        x = memory.data();
        const int64_t whole = rows * inner / 8 * 8;
        for (int64_t i = 0; i < whole; i += 8) _mm256_storeu_ps(x + i, load(from + i));
        for (int64_t i = whole; i < rows * inner; ++i) x[i] = from[i];
        for (int64_t r = 0; r < int64_t(sums.size()); ++r) {
            __m256 sum = _mm256_setzero_ps();
            for (int64_t k = 0; k < inner; k += 8) {
                sum = _mm256_add_ps(sum, load(x + r * inner + k, inner - k));
            }
            sums[r] = sum_of(sum);
        }
    }
};

// Of eight columns the first (PLACE 0) or second value of a pair, as they are packed.
template <int PLACE>
inline __m256 half_of(const at::BFloat16* from) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
    return _mm256_castsi256_ps(PLACE ? _mm256_and_si256(both, upper) : _mm256_slli_epi32(both, 16));
}

template <int PLACE>
inline __m256 half_of(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m256i both = _mm256_cvtepu16_epi32(bytes), lower = _mm256_set1_epi32(0xff);
    return _mm256_cvtepi32_ps(PLACE ? _mm256_srli_epi32(both, 8) : _mm256_and_si256(both, lower));
}

// out[r][first .. first + 8 C - 1] = x[r] . block + bias, of which the first `columns` are stored.
template <int R, int C, bool IN_BYTES>
inline void multiply_columns(int first, const float* x, int64_t inner, const float* totals,
                             const at::BFloat16* block, const at::BFloat16* bias,
                             at::BFloat16* out, int64_t size, int columns, Ahead ahead) {
    using packed_t = std::conditional_t<IN_BYTES, uint8_t, at::BFloat16>;
    const auto* weights = reinterpret_cast<const packed_t*>(block);
    auto bias_of = [&](int c) INLINE {
        return bias ? load(bias + c * 8, columns - c * 8) : _mm256_setzero_ps();
    };
    __m256 sums[R * C];
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
        sums[i] = IN_BYTES ? _mm256_setzero_ps() : bias_of(first / 8 + i % C);
    });
    // In this order weights of two registers are all that is kept beside the sums.
    auto half = [&](int64_t k, int start, auto place) INLINE {
        __m256 w[2];
        c10::ForcedUnroll<2>{}([&](auto c) INLINE {
            w[c] = half_of<place()>(weights + k * 32 + first * 2 + (start + c) * 16);
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
    if constexpr (IN_BYTES) {
        auto* scales = reinterpret_cast<const float*>(weights + inner * 32) + first;
        c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
            const __m256 shifted = _mm256_sub_ps(sums[i], _mm256_set1_ps(ZERO * totals[i / C]));
            const __m256 scale = _mm256_loadu_ps(scales + i % C * 8);
            sums[i] = _mm256_fmadd_ps(shifted, scale, bias_of(first / 8 + i % C));
        });
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
        const int column = first + i % C * 8;
        store(sums[i], out + i / C * size + column, columns - column);
    });
}

// out[r][0..31] = x[row + r] . block + bias for R rows, of which the first `columns` are stored.
template <int R, bool IN_BYTES>
inline void multiply(std::integral_constant<int, R>, const Factors<IN_BYTES>& factors, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const auto* x = factors.x + row * factors.inner;
    const auto* totals = factors.sums.data() + row;
    const int64_t inner = factors.inner;
    constexpr int C = R <= 2 ? 4 : 2;
    for (int first = 0; first < 32; first += 8 * C) {
        const int left = (32 - first) / (8 * C);  // times, each of which fetches its share
        const Ahead now{ahead.start, (ahead.lines + left - 1) / left};
        multiply_columns<R, C, IN_BYTES>(first, x, inner, totals, block, bias, out, size, columns,
                                         now);
        ahead = {now.after(inner).start, ahead.lines - now.lines};
    }
}
}  // namespace
#endif
