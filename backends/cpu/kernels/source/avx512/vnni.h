// Products of few rows of whole numbers with blocks of packed weights, see `int8.h`.
#ifndef DRAFTHEAD_VNNI
#define DRAFTHEAD_VNNI
#include "ahead.h"
#include "scaled.h"

namespace {
constexpr int FEW_INT8 = 2;  // as FEW

// out[r][0..31] = x[row + r] . block + bias for R rows, of which the first `columns` are stored.
template <int R>
inline void multiply(std::integral_constant<int, R>, const Int8Rows& rows, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const auto* x = rows.numbers + row * rows.inner;
    const Int8Block weights(block, rows.inner);
    __m512i sums[2 * R];
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        sums[i] = _mm512_loadu_si512(weights.starts + i % 2 * 16);
    });
    auto four = [&](int64_t k) INLINE {
        const Fours left(_mm512_loadu_si512(weights.numbers + k * 32));
        const Fours right(_mm512_loadu_si512(weights.numbers + k * 32 + 64));
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const auto values = *reinterpret_cast<const int32_t*>(x + r * rows.inner + k);
            const __m512i repeated = _mm512_set1_epi32(values);
            sums[2 * r] = add_products(sums[2 * r], repeated, left);
            sums[2 * r + 1] = add_products(sums[2 * r + 1], repeated, right);
        });
    };
    for (int64_t k = 0; k < rows.inner; k += 16) {
        if constexpr (R > FEW_INT8) {
            for (int line = 0; line < 2 * ahead.lines; ++line, ahead.start += 32) {
                _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
            }
        }
        four(k);
        four(k + 4);
        four(k + 8);
        four(k + 12);
    }
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        const int column = i % 2 * 16;
        store_scaled(sums[i], rows.scales[row + i / 2], weights.scales + column,
                     bias ? bias + column : nullptr, out + i / 2 * size + column, columns - column);
    });
}
}  // namespace
#endif
