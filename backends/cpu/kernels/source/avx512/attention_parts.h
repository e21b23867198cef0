// What attention by registers and by tiles have in common.
#ifndef DRAFTHEAD_ATTENTION_PARTS
#define DRAFTHEAD_ATTENTION_PARTS
#include "numbers.h"

namespace {
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

// out[0..31] = share * the sums of 32 values: unpacking has put values 0-3, 8-11, ... into `low` and
// 4-7, 12-15, ... into `high`.
inline void store_shares(__m512 low, __m512 high, float share, at::BFloat16* out) {
    const __m512i order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    auto rounded = [&](__m512 total) INLINE {
        const __m512 product = _mm512_mul_ps(total, _mm512_set1_ps(share));
        return _mm512_castsi256_si512(narrow(product));
    };
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(rounded(low), order, rounded(high)));
}
}  // namespace
#endif
