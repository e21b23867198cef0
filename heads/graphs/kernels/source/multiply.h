// Products of few rows with blocks of packed weights, in bfloat16 or in bytes. A block in bytes has
// the values 128 + v of 32 columns, for v of 0 to 127, without their leading bits, which are the same
// for all; then 32 scales in float32. A weight is scale * (128 + v - ZERO).
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "common.h"

namespace {
// Few rows wait for memory, which the processor then reads ahead by itself: asking as well takes a
// third longer. More are busy with arithmetic, and so are three in bytes: they have to ask.
template <bool IN_BYTES>
constexpr int FEW = IN_BYTES ? 2 : 6;
constexpr float ZERO = 192;

// Values of one block of 32 columns, counted in bfloat16.
template <bool IN_BYTES>
inline int64_t block_size(int64_t inner) { return IN_BYTES ? 16 * inner + 64 : 32 * inner; }

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

// What products fetch for those that follow: `lines` cache lines from `start` on for every eight
// values of x, of which there is one line each.
struct Ahead {
    const at::BFloat16* start;
    int lines;

    // What the next product goes on with, after one of `inner` values of x.
    Ahead after(int64_t inner) const { return {start + inner / 8 * lines * 32, lines}; }
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

// f(first row, number of rows as a constant, what to fetch) for groups of rows that are multiplied
// with `values` weights together.
template <bool IN_BYTES, typename F>
inline void in_groups_ahead(int64_t rows, const at::BFloat16* weights, int64_t values, const F& f) {
    // Sums of 12 rows and 32 columns fill 24 of the 32 registers.
    constexpr int MOST = 12, GROUP = 8, DISTANCE = 128 * 32, LINES = IN_BYTES ? 4 : 8;
    if (rows <= MOST) {
        with_rows<MOST>(rows, [&](auto count) { f(0, count, Ahead{weights + DISTANCE, LINES}); });
        return;
    }
    // The first group finds the weights in the cache. All groups fetch a part of the next weights,
    // so that memory is read all the time.
    const int64_t groups = (rows + GROUP - 1) / GROUP;
    const int parts = std::min(LINES, groups >= 8 ? 8 : groups >= 4 ? 4 : 2);
    int group = 0;
    in_groups<GROUP>(rows, [&](int64_t r, auto count) {
        const int lines = group < parts ? LINES / parts : 0;
        f(r, count, Ahead{weights + values + group * (values / parts), lines});
        ++group;
    });
}
}  // namespace
#endif
