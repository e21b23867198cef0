#ifndef DRAFTHEAD_SCORES
#define DRAFTHEAD_SCORES
#include "tiles.h"

namespace {
constexpr int KEY_BLOCKS = 4;  // of 16 keys, turned before they are multiplied

// scores[r][0 .. 16 blocks - 1] = scale * queries[r] . key, for up to 16 rows
template <int D>
inline void score_rows(const at::BFloat16* queries, int64_t rows, const __m512i* keys, int blocks,
                       float scale, float* scores, int64_t width) {
    const Shapes shapes(rows, 1);
    written_for_tiles();
    _tile_loadconfig(&shapes);
    for (int b = 0; b < blocks; ++b) {
        _tile_zero(0);
        for (int d = 0; d < D; d += 32) {
            _tile_loadd(4, queries + d, D * 2);
            _tile_loadd(6, keys + b * D / 2 + d / 2, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + b * 16, width * 4);
    }
    _tile_release();
    for (int64_t r = 0; r < rows; ++r) {
        for (float* some = scores + r * width; some < scores + r * width + blocks * 16; some += 16) {
            _mm512_storeu_ps(some, _mm512_mul_ps(_mm512_loadu_ps(some), _mm512_set1_ps(scale)));
        }
    }
}
}  // namespace
#endif
