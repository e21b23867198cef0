// Products of few rows of whole numbers with blocks of packed weights, see `int8.h`.
#ifndef DRAFTHEAD_MULTIPLY_INT8
#define DRAFTHEAD_MULTIPLY_INT8
#include "int8.h"
#include "multiply.h"

namespace {
// Four bytes of x, repeated eight times, as products need them.
struct Fours {
#ifdef __AVXVNNI__
    __m256i all;
    explicit Fours(__m256i fours) : all(fours) {}
#else
    __m256i even, odd;  // numbers of 16 bits
    explicit Fours(__m256i fours)
        : even(_mm256_and_si256(fours, _mm256_set1_epi16(0xff))), odd(_mm256_srli_epi16(fours, 8)) {}
#endif
};

// sums + the products of the fours of eight columns with those of x
inline __m256i multiplied(__m256i sums, const Fours& x, __m256i weights) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sums, x.all, weights);
#else
    // Not by _mm256_maddubs_epi16, whose sums of two products can be too large for 16 bits.
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8);
    const __m256i odd = _mm256_srai_epi16(weights, 8);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(x.even, even));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(x.odd, odd));
#endif
}

// out[r][first .. first + 8 C - 1] = x[row + r] . block + bias, of which the first `columns` are stored.
template <int R, int C>
inline void multiply_columns(int first, const Int8Rows& rows, int64_t row, const Int8Block& block,
                             const at::BFloat16* bias, at::BFloat16* out, int64_t size,
                             int columns, Ahead ahead) {
    const auto* x = rows.numbers + row * rows.inner;
    auto eight = [](const auto* from) INLINE {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    };
    __m256i sums[R * C];
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
        sums[i] = eight(block.starts + first + i % C * 8);
    });
    for (int64_t k = 0; k < rows.inner; k += 4) {
        if (k % 16 == 0) {
            for (int line = 0; line < 2 * ahead.lines; ++line, ahead.start += 32) {
                _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
            }
        }
        __m256i weights[C];
        c10::ForcedUnroll<C>{}([&](auto c) INLINE {
            weights[c] = eight(block.numbers + k * 32 + (first + c * 8) * 4);
        });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const auto values = *reinterpret_cast<const int32_t*>(x + r * rows.inner + k);
            const Fours fours(_mm256_set1_epi32(values));
            c10::ForcedUnroll<C>{}([&](auto c) INLINE {
                sums[r * C + c] = multiplied(sums[r * C + c], fours, weights[c]);
            });
        });
    }
    c10::ForcedUnroll<R * C>{}([&](auto i) INLINE {
        const int column = first + i % C * 8;
        const __m256 both = _mm256_mul_ps(_mm256_set1_ps(rows.scales[row + i / C]),
                                          _mm256_loadu_ps(block.scales + column));
        __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[i]), both);
        if (bias) product = _mm256_add_ps(product, load(bias + column, columns - column));
        store(product, out + i / C * size + column, columns - column);
    });
}

// out[r][0..31] = x[row + r] . block + bias for R rows, of which the first `columns` are stored.
template <int R>
inline void multiply(std::integral_constant<int, R>, const Int8Rows& rows, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const Int8Block weights(block, rows.inner);
    in_parts<R>(rows.inner, ahead, [&](int first, auto C, Ahead now) {
        multiply_columns<R, C()>(first, rows, row, weights, bias, out, size, columns, now);
    });
}
}  // namespace
#endif
