// Products of up to 32 rows with blocks of packed weights, in bfloat16 or in bytes, by tiles: of x 16
// rows and 32 values, of weights the pairs of 32 values and 16 columns as they are packed. A product
// of two tiles adds up the first and the second values of the pairs apart, then both to the sums: in
// one order, whatever the number of rows. Numbers too small for float32's usual form count as 0.
#ifndef DRAFTHEAD_MULTIPLY
#define DRAFTHEAD_MULTIPLY
#include "ahead.h"
#include "factors.h"
#include "tiles.h"

namespace {
constexpr int MOST_ROWS = 2 * TILE;
constexpr int STEP = 32;  // values of x in a tile
constexpr int64_t DISTANCE = 128 * 32;  // of values that one group of rows fetches ahead
constexpr int EXPANDED = 4;  // steps of weights in bytes that are kept in bfloat16

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
template <bool TWO, bool IN_BYTES>
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
    alignas(64) at::BFloat16 expanded[EXPANDED][STEP * 32];
    const auto* bytes = reinterpret_cast<const uint8_t*>(block);
    // Weights of 32 values of x from k on, zeros after the last.
    auto copy = [&](int64_t k, at::BFloat16* to) INLINE {
        const int lines = std::min<int64_t>(STEP, inner - k);
        for (int i = 0; i < lines; ++i) {
            if constexpr (IN_BYTES) _mm512_store_si512(to + i * 32, from_bytes(bytes + (k + i) * 32));
            else _mm512_store_si512(to + i * 32, _mm512_loadu_si512(block + (k + i) * 32));
        }
        for (int i = lines; i < STEP; ++i) _mm512_store_si512(to + i * 32, _mm512_setzero_si512());
    };
    int64_t k = 0;
    if constexpr (IN_BYTES) copy(0, expanded[0]);
    for (; k + STEP <= inner; k += STEP) {
        for (int line = 0; line < STEP / 8 * ahead.lines; ++line, ahead.start += 32) {
            _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
        }
        if constexpr (IN_BYTES) {
            if (k + STEP < inner) copy(k + STEP, expanded[(k / STEP + 1) % EXPANDED]);
            written_for_tiles();
            multiply_tiles<TWO>(x + k, inner, expanded[k / STEP % EXPANDED]);
        } else {
            multiply_tiles<TWO>(x + k, inner, block + k * 32);
        }
    }
    if (k < inner) {
        alignas(64) at::BFloat16 last[MOST_ROWS][STEP] = {};
        for (int r = 0; r < rows; ++r) std::copy(x + r * inner + k, x + (r + 1) * inner, last[r]);
        if constexpr (!IN_BYTES) copy(k, expanded[0]);
        written_for_tiles();
        multiply_tiles<TWO>(last[0], STEP, expanded[IN_BYTES ? k / STEP % EXPANDED : 0]);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    if constexpr (TWO) {
        _tile_stored(2, sums + TILE * 32, 128);
        _tile_stored(3, sums + TILE * 32 + TILE, 128);
    }
}

// out[r][0..31] = x[row + r] . block + bias, of which the first `columns` are stored.
template <bool IN_BYTES>
inline void multiply(int rows, const Factors<IN_BYTES>& factors, int64_t row,
                     const at::BFloat16* block, const at::BFloat16* bias, at::BFloat16* out,
                     int64_t size, int columns, Ahead ahead) {
    const __mmask16 some[2] = {first(columns), first(std::max(columns - 16, 0))};
    const int64_t inner = factors.inner;
    alignas(64) float biases[32], nothing[32] = {}, sums[MOST_ROWS * 32];
    for (int c : {0, 1}) {
        _mm512_store_ps(biases + c * 16, bias ? load(bias + c * 16, some[c]) : _mm512_setzero_ps());
    }
    const auto* start = IN_BYTES ? nothing : biases;
    const auto* x = factors.x + row * inner;
    if (rows > TILE) sum_up<true, IN_BYTES>(rows, x, inner, block, start, sums, ahead);
    else sum_up<false, IN_BYTES>(rows, x, inner, block, start, sums, ahead);
    const auto* scales = reinterpret_cast<const float*>(block + inner * 16);
    for (int r = 0; r < rows; ++r) {
        for (int c : {0, 1}) {
            __m512 sum = _mm512_load_ps(sums + r * 32 + c * 16);
            if constexpr (IN_BYTES) {
                const __m512 shift = _mm512_set1_ps(ZERO * factors.sums[row + r]);
                const __m512 scale = _mm512_loadu_ps(scales + c * 16);
                sum = _mm512_fmadd_ps(_mm512_sub_ps(sum, shift), scale,
                                      _mm512_load_ps(biases + c * 16));
            }
            store(sum, out + r * size + c * 16, some[c]);
        }
    }
}
}  // namespace
#endif
