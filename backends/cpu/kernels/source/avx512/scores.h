#ifndef DRAFTHEAD_SCORES
#define DRAFTHEAD_SCORES
#include "pairs.h"

namespace {
constexpr int SCORED = 8;  // rows whose sums of scores fit into registers
constexpr int KEY_BLOCKS = 4;  // of 16 keys, turned before they are multiplied

// scores[r][0 .. 16 B - 1] = scale * query[r] . key, for B blocks of turned keys
template <int D, int R, int B>
inline void score(const number_t* query, const __m512i* keys, float scale, float* scores,
                  int64_t width) {
    __m512 sums[R * B];
    c10::ForcedUnroll<R * B>{}([&](auto i) INLINE { sums[i] = _mm512_setzero_ps(); });
    for (int pair = 0; pair < D / 2; ++pair) {
        Pairs k[B];
        c10::ForcedUnroll<B>{}([&](auto b) INLINE { k[b] = Pairs(keys[b * D / 2 + pair]); });
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            const Two q(query + r * D + 2 * pair);
            c10::ForcedUnroll<B>{}([&](auto b) INLINE {
                sums[r * B + b] = add_products(sums[r * B + b], q, k[b]);
            });
        });
    }
    c10::ForcedUnroll<R * B>{}([&](auto i) INLINE {
        __m512 scaled = _mm512_mul_ps(sums[i], _mm512_set1_ps(scale));
        _mm512_storeu_ps(scores + i / B * width + i % B * 16, scaled);
    });
}

// scores[r][0 .. 16 blocks - 1] = scale * queries[r] . key, for at most KEY_BLOCKS blocks
template <int D>
inline void score_rows(const number_t* queries, int64_t rows, const __m512i* keys, int blocks,
                       float scale, float* scores, int64_t width) {
    in_groups<SCORED>(rows, [&](int64_t r, auto count) {
        // Few rows take more keys at once: sums that wait for each other take six cycles each.
        constexpr int R = count(), B = R <= SCORED / 2 ? KEY_BLOCKS : KEY_BLOCKS / 2;
        const auto* query = queries + r * D;
        float* out = scores + r * width;
        int b = 0;
        for (; b + B <= blocks; b += B) {
            score<D, R, B>(query, keys + b * D / 2, scale, out + b * 16, width);
        }
        for (; b < blocks; ++b) {
            score<D, R, 1>(query, keys + b * D / 2, scale, out + b * 16, width);
        }
    });
}
}  // namespace
#endif
