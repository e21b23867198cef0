// Products of few rows of whole numbers with blocks of packed weights, see `int8.h`.
#ifndef DRAFTHEAD_MULTIPLY_INT8
#define DRAFTHEAD_MULTIPLY_INT8
#include "int8.h"
#include "multiply.h"

namespace {
// out[r][first .. first + 8 C - 1] = x[row + r] . block + bias, of which the first `columns` are stored.
template <int R, int C>
inline void multiply_columns(int first, const Int8Rows& rows, int64_t row, const Int8Block& block,
                             const at::BFloat16* bias, at::BFloat16* out, int64_t size,
                             int columns, Ahead ahead) {
    const auto* x = rows.numbers + row * rows.inner;
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
        const auto* weights = block.numbers + k * 32 + first * 4;
        Fours fours[C];
        c10::ForcedUnroll<C>{}([&](auto c) INLINE { fours[c] = Fours(weights + c * 32); });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const auto values = *reinterpret_cast<const int32_t*>(x + r * rows.inner + k);
            const __m256i repeated = _mm256_set1_epi32(values);
            c10::ForcedUnroll<C>{}([&](auto c) INLINE {
                sums[r * C + c] = add_products(sums[r * C + c], repeated, fours[c]);
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
