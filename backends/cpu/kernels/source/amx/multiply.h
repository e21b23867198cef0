// Products of up to 32 rows with blocks of packed weights, in bfloat16, by tiles: of x 16
// rows and 32 values, of weights the pairs of 32 values and 16 columns as they are packed. A product
// of two tiles adds up the first and the second values of the pairs apart, then both to the sums: in
// one order, whatever the number of rows. Numbers too small for float32's usual form count as 0.
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "bfloat16_rows.h"
#include "tiles.h"

namespace {
constexpr int MOST_ROWS = 2 * TILE;
constexpr int STEP = 32;  // values of x in a tile
constexpr int64_t DISTANCE = 128 * 32;  // of values that one group of rows fetches ahead

// sums += x [rows, 32] times weights, of which the pairs of 32 columns are side by side
template <bool TWO>
inline void multiply_tiles(const at::BFloat16* x, int64_t stride, const at::BFloat16* weights) {
    _tile_loadd(4, x, stride * 2);
    _tile_loadd(6, weights, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 32, 128);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO) {
        _tile_loadd(5, x + TILE * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// sums [rows, 32] = start [32] + x [rows, inner] . block
template <bool TWO>
inline void sum_up(int rows, const at::BFloat16* x, int64_t inner, const at::BFloat16* block,
                   const float* start, float* sums, Ahead ahead) {
    const Shapes shapes(TWO ? TILE : rows, TWO ? rows - TILE : 1);
    written_for_tiles();
    _tile_loadconfig(&shapes);
    _tile_loadd(0, start, 0);  // the same for each row
    _tile_loadd(1, start + TILE, 0);
    if constexpr (TWO) {
        _tile_loadd(2, start, 0);
        _tile_loadd(3, start + TILE, 0);
    }
    int64_t k = 0;
    for (; k + STEP <= inner; k += STEP) {
        for (int line = 0; line < STEP / 8 * ahead.lines; ++line, ahead.start += 32) {
            _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
        }
        multiply_tiles<TWO>(x + k, inner, block + k * 32);
    }
    if (k < inner) {
        alignas(64) at::BFloat16 last[MOST_ROWS][STEP] = {}, weights[STEP * 32] = {};
        for (int r = 0; r < rows; ++r) std::copy(x + r * inner + k, x + (r + 1) * inner, last[r]);
        std::copy(block + k * 32, block + inner * 32, weights);
        written_for_tiles();
        multiply_tiles<TWO>(last[0], STEP, weights);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    if constexpr (TWO) {
        _tile_stored(2, sums + TILE * 32, 128);
        _tile_stored(3, sums + TILE * 32 + TILE, 128);
    }
}

// out[r][0..31] = x[row + r] . block + bias, of which the first `columns` are stored.
inline void multiply(int rows, const Bfloat16Rows& factors, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const __mmask16 some[2] = {first(columns), first(std::max(columns - 16, 0))};
    const int64_t inner = factors.inner;
    alignas(64) float biases[32], sums[MOST_ROWS * 32];
    for (int c : {0, 1}) {
        _mm512_store_ps(biases + c * 16, bias ? load(bias + c * 16, some[c]) : _mm512_setzero_ps());
    }
    const auto* x = factors.x + row * inner;
    if (rows > TILE) sum_up<true>(rows, x, inner, block, biases, sums, ahead);
    else sum_up<false>(rows, x, inner, block, biases, sums, ahead);
    for (int r = 0; r < rows; ++r) {
        for (int c : {0, 1}) {
            store(_mm512_load_ps(sums + r * 32 + c * 16), out + r * size + c * 16, some[c]);
        }
    }
}
}  // namespace
#endif
