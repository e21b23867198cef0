// Products of few rows with blocks of packed weights, in bfloat16 or in bytes. A block in bytes has
// the values 128 + v of 32 columns, for v of 0 to 127, without their leading bits, which are the same
// for all; then 32 scales in float32. A weight is scale * (128 + v - ZERO).
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "numbers.h"
#include <vector>

namespace {
// Few rows wait for memory, which the processor then reads ahead by itself: asking as well takes a
// third longer. More are busy with arithmetic, and so are three in bytes: they have to ask.
template <bool IN_BYTES>
constexpr int FEW = IN_BYTES ? 2 : 6;
constexpr float ZERO = 192;
// Sums of 12 rows and 32 columns fill 24 of the 32 registers.
constexpr int MOST_ROWS = 12, GROUP_ROWS = 8;

// How far before they are needed weights are fetched.
inline int64_t distance_of(int64_t) { return 128 * 32; }

// Sums over each row of x [rows, inner], which blocks in bytes need.
inline std::vector<float> sums_of(const at::BFloat16* x, int64_t rows, int64_t inner) {
    std::vector<float> sums(rows);
    for (int64_t r = 0; r < rows; ++r) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < inner; k += 16) {
            sum = _mm512_add_ps(sum, load(x + r * inner + k, first(inner - k)));
        }
        sums[r] = _mm512_reduce_add_ps(sum);
    }
    return sums;
}

// Rows of x [rows, inner] and, for blocks in bytes, their sums.
template <bool IN_BYTES>
struct Factors {
    const at::BFloat16* x;
    int64_t inner;
    std::vector<float> sums;

    Factors(const at::BFloat16* x, int64_t rows, int64_t inner) : x(x), inner(inner) {
        if constexpr (IN_BYTES) sums = sums_of(x, rows, inner);
    }

    const at::BFloat16* row(int64_t r) const { return x + r * inner; }
    const float* totals(int64_t r) const { return sums.data() + r; }
};

// out[r][0..31] = x[r] . block + bias, of which the first `columns` are stored. For blocks in bytes,
// `totals` are the sums over each x[r].
template <int R, bool IN_BYTES>
inline void multiply(const at::BFloat16* x, int64_t inner, const float* totals,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const __mmask16 some[2] = {first(columns), first(std::max(columns - 16, 0))};
    auto bias_of = [&](int c) INLINE {
        return bias ? load(bias + c * 16, some[c]) : _mm512_setzero_ps();
    };
    __m512 sums[2 * R];
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        sums[i] = IN_BYTES ? _mm512_setzero_ps() : bias_of(i % 2);
    });
    const auto* bytes = reinterpret_cast<const uint8_t*>(block);
    // One instruction multiplies a pair of x, repeated 16 times, with the pairs of 16 columns.
    auto pair = [&](int64_t k) INLINE {
        auto weights = [&](int c) INLINE {
            if constexpr (IN_BYTES) {
                auto* from = reinterpret_cast<const __m256i*>(bytes + (k + c) * 32);
                __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
                return (__m512bh)_mm512_or_si512(low, _mm512_set1_epi16(0x4300));  // 128
            } else {
                return (__m512bh)_mm512_loadu_si512(block + k * 32 + c * 32);
            }
        };
        __m512bh left = weights(0), right = weights(1);
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            auto values = *reinterpret_cast<const int32_t*>(x + r * inner + k);
            __m512bh repeated = (__m512bh)_mm512_set1_epi32(values);
            sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], repeated, left);
            sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], repeated, right);
        });
    };
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8) {
        if constexpr (R > FEW<IN_BYTES>) {
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
    if constexpr (IN_BYTES) {
        auto* scales = reinterpret_cast<const float*>(bytes + inner * 32);
        c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
            __m512 shift = _mm512_set1_ps(ZERO * totals[i / 2]);
            __m512 scale = _mm512_loadu_ps(scales + i % 2 * 16);
            sums[i] = _mm512_fmadd_ps(_mm512_sub_ps(sums[i], shift), scale, bias_of(i % 2));
        });
    }
    c10::ForcedUnroll<2 * R>{}([&](auto i) INLINE {
        store(sums[i], out + i / 2 * size + i % 2 * 16, some[i % 2]);
    });
}
}  // namespace
#endif
