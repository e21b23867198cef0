// Products of few rows with blocks of packed weights, in bfloat16.
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "pairs.h"

namespace {
// Few rows wait for memory, which the processor then reads ahead by itself: asking as well takes a
// third longer. More are busy with arithmetic: they have to ask.
constexpr int FEW = 6;
// Sums of 12 rows and 32 columns fill 24 of the 32 registers.
constexpr int MOST_ROWS = 12, GROUP_ROWS = 8;

// How far before they are needed weights are fetched.
inline int64_t distance_of(int64_t) { return 128 * 32; }

// out[r][0..31] = x[row + r] . block + bias for R rows, of which the first `columns` are stored.
template <int R>
inline void multiply(std::integral_constant<int, R>, const Bfloat16Rows& factors, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const auto* x = factors.x + row * factors.inner;
    const int64_t inner = factors.inner;
    const __mmask16 some[2] = {first(columns), first(std::max(columns - 16, 0))};
    auto bias_of = [&](int c) INLINE {
        return bias ? load(bias + c * 16, some[c]) : _mm512_setzero_ps();
    };
    __m512 sums[2 * R];
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE { sums[i] = bias_of(i % 2); });
    auto pair = [&](int64_t k) INLINE {
        const Pairs left(_mm512_loadu_si512(block + k * 32));
        const Pairs right(_mm512_loadu_si512(block + k * 32 + 32));
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const Two two(x + r * inner + k);
            sums[2 * r] = add_products(sums[2 * r], two, left);
            sums[2 * r + 1] = add_products(sums[2 * r + 1], two, right);
        });
    };
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8) {
        if constexpr (R > FEW) {
            for (int line = 0; line < ahead.lines; ++line, ahead.start += 32) {
                _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
            }
        }
        pair(k);
        pair(k + 2);
        pair(k + 4);
        pair(k + 6);
    }
    for (; k < inner; k += 2) {
        pair(k);
    }
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        store(sums[i], out + i / 2 * size + i % 2 * 16, some[i % 2]);
    });
}
}  // namespace
#endif
