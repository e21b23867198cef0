// Products of up to 32 rows of whole numbers with blocks of packed weights by tiles, see `int8.h`: of x
// 16 rows and 64 values, of weights the fours of 64 values and 16 columns as they are packed.
#ifndef DRAFTHEAD_MULTIPLY_INT8
#define DRAFTHEAD_MULTIPLY_INT8
#include "multiply.h"
#include "vnni.h"

namespace {
constexpr int BY_VNNI = 12;  // so few rows fill no tile, and have the same sums without

// sums [rows, 32] = start [32] + x [rows, inner] . block
template <bool TWO>
inline void sum_up_int8(int rows, const uint8_t* x, int64_t inner, const Int8Block& block,
                        int32_t* sums, Ahead ahead) {
    const Shapes shapes(TWO ? TILE : rows, TWO ? rows - TILE : 1);
    written_for_tiles();
    _tile_loadconfig(&shapes);
    _tile_loadd(0, block.starts, 0);  // the same for each row
    _tile_loadd(1, block.starts + TILE, 0);
    if constexpr (TWO) {
        _tile_loadd(2, block.starts, 0);
        _tile_loadd(3, block.starts + TILE, 0);
    }
    for (int64_t k = 0; k < inner; k += TURNED) {
        for (int line = 0; line < TURNED / 8 * ahead.lines; ++line, ahead.start += 32) {
            _mm_prefetch((const char*)ahead.start, _MM_HINT_T1);
        }
        _tile_loadd(4, x + k, inner);
        _tile_loadd(6, block.numbers + k * 32, 128);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, block.numbers + k * 32 + 64, 128);
        _tile_dpbusd(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, x + TILE * inner + k, inner);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + TILE, 128);
    if constexpr (TWO) {
        _tile_stored(2, sums + TILE * 32, 128);
        _tile_stored(3, sums + TILE * 32 + TILE, 128);
    }
}

// out[r][0..31] = x[row + r] . block + bias, of which the first `columns` are stored.
inline void multiply(int count, const Int8Rows& rows, int64_t row, const at::BFloat16* block,
                     const at::BFloat16* bias, at::BFloat16* out, int64_t size, int columns,
                     Ahead ahead) {
    if (count <= BY_VNNI) {
        with_rows<BY_VNNI>(count, [&](auto few) {
            multiply(few, rows, row, block, bias, out, size, columns, ahead);
        });
        return;
    }
    alignas(64) int32_t sums[MOST_ROWS * 32];
    const Int8Block weights(block, rows.inner);
    const auto* x = rows.numbers + row * rows.inner;
    if (count > TILE) sum_up_int8<true>(count, x, rows.inner, weights, sums, ahead);
    else sum_up_int8<false>(count, x, rows.inner, weights, sums, ahead);
    written_for_tiles();
    for (int r = 0; r < count; ++r) {
        for (int c : {0, 16}) {
            store_scaled(_mm512_load_si512(sums + r * 32 + c), rows.scales[row + r],
                         weights.scales + c, bias ? bias + c : nullptr, out + r * size + c,
                         columns - c);
        }
    }
}
}  // namespace
#endif
