// Products of many rows with weights in blocks whose groups share factors, by tiles: of x 16 rows and 64
// values, of weights their numbers times the scales of groups, for 16 columns. These have up to 13 bits:
// a product with the upper ones is added to one with the lower ones.
#ifndef DRAFTHEAD_SUPER_TILES
#define DRAFTHEAD_SUPER_TILES
#include "tiles.h"

namespace {
constexpr int FEW_FOR_TILES = 6;  // so few rows fill no tile, and have the same bits without

template <typename Form>
class SuperTiles {
    static constexpr int PARTS = Form::PARTS, READ = 8;  // rows whose sums are read at a time
    static constexpr int SHIFT = Form::HAS_MINIMA ? 3 : 8;
    static constexpr int LINES = Form::bytes(SUPER) / LINE;
    // Of the upper and the lower bits of two times 16 columns, the fours of 256 values.
    alignas(LINE) uint8_t numbers[2][2][8 * SUPER][4 * TILE];
    alignas(LINE) int32_t sums[2][2][TILE][TILE];
    const uint8_t* fetched;

    // The scale of each column for both halves of its fours.
    static __m512i in_halves(__m512i scale) {
        return _mm512_mask_blend_epi16(0xaaaaaaaa, scale, _mm512_slli_epi32(scale, 16));
    }

    // The numbers times scales of 16 columns. Scales of six bits are split: three bits times a number of
    // five fit into a byte, so a product of two bytes as one number is that of both. Others are products
    // of 16 bits, which are split.
    INLINE static void scaled(__m512i numbers, __m512i scale, uint8_t* upper, uint8_t* lower) {
        if constexpr (Form::HAS_MINIMA) {
            const __m512i three_bits = _mm512_set1_epi16(7);
            _mm512_store_si512(upper, _mm512_mullo_epi16(numbers, _mm512_srli_epi16(scale, 3)));
            _mm512_store_si512(lower, _mm512_mullo_epi16(numbers, _mm512_and_si512(scale, three_bits)));
        } else {
            const __m512i start = _mm512_slli_epi16(scale, Form::BITS - 1);
            const __m512i of_even = _mm512_and_si512(scale, _mm512_set1_epi16(255));
            const __m512i of_odd = _mm512_slli_epi16(scale, 8);
            const __m512i even = _mm512_sub_epi16(_mm512_maddubs_epi16(numbers, of_even), start);
            const __m512i odd = _mm512_sub_epi16(_mm512_maddubs_epi16(numbers, of_odd), start);
            constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
            _mm512_store_si512(upper, _mm512_mask_mov_epi8(_mm512_srli_epi16(even, 8), ODD, odd));
            _mm512_store_si512(lower, _mm512_mask_mov_epi8(even, ODD, _mm512_slli_epi16(odd, 8)));
        }
    }

    // Asks memory for a share of what follows: it answers few lines at a time, so all steps ask for some.
    INLINE void fetch(int share) {
        for (int i = 0; i < (LINES + share - 1) / share; ++i, fetched += LINE) {
            _mm_prefetch((const char*)fetched, _MM_HINT_T1);
        }
    }

    // Unpacks eight groups.
    void unpack(Place<Form> from) {
        for (int g = 0; g < SUPER; ++g, ++from.group, from.own += Form::NUMBERS) {
            fetch(20);
            for (int c : {0, 1}) {
                c10::ForcedUnroll<PARTS>{}([&](auto part) INLINE {
                    const __m512i scale = in_halves(from.scale(part, c * TILE));
                    c10::ForcedUnroll<8 / PARTS>{}([&](auto i) INLINE {
                        constexpr int four = part * 8 / PARTS + i;
                        scaled((__m512i)from.number(c * TILE, four), scale, numbers[c][0][8 * g + four],
                               numbers[c][1][8 * g + four]);
                    });
                });
            }
        }
        written_for_tiles();
    }

    // sums = the 16 rows of x of one of so many tiles, times the numbers; its values 64 at a time are
    // `pairs` rows apart.
    void multiply(const int8_t* x, int64_t pairs, int tiles) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < SUPER / 2; ++k, x += pairs * 64) {
            _tile_loadd(4, x, 64);
            fetch(10 * tiles);
            _tile_loadd(5, numbers[0][0][k * TILE], 64);
            _tile_loadd(6, numbers[0][1][k * TILE], 64);
            if constexpr (Form::HAS_MINIMA) _tile_dpbsud(0, 4, 5);
            else _tile_dpbssd(0, 4, 5);
            _tile_dpbsud(1, 4, 6);
            _tile_loadd(5, numbers[1][0][k * TILE], 64);
            _tile_loadd(6, numbers[1][1][k * TILE], 64);
            if constexpr (Form::HAS_MINIMA) _tile_dpbsud(2, 4, 5);
            else _tile_dpbssd(2, 4, 5);
            _tile_dpbsud(3, 4, 6);
        }
        _tile_stored(0, sums[0][0], 64);
        _tile_stored(1, sums[0][1], 64);
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
        written_for_tiles();
    }

   public:
    SuperTiles() {
        const Shapes shapes(TILE, TILE);
        written_for_tiles();
        _tile_loadconfig(&shapes);
    }

    // totals[r] + x[row + r] . eight groups
    void add(floats (*totals)[32 / LANES], int count, const BlockRows& x, int64_t row,
             const Place<Form>& at) {
        fetched = at.own + FETCHED_AHEAD;
        unpack(at);
        const int tiles = (count + TILE - 1) / TILE;
        for (int first = 0; first < count; first += TILE) {
            multiply(x.for_tiles + (at.group / 2 * x.rows + row + first) * 64, x.rows, tiles);
            for (int r = 0; r < TILE && first + r < count; r += READ) {
                __m512i whole[READ][TOGETHER];
                c10::ForcedUnroll<READ>{}([&](auto i) INLINE {
                    for (int c : {0, 1}) {
                        const __m512i upper = _mm512_load_si512(sums[c][0][r + i]);
                        whole[i][c] = _mm512_add_epi32(_mm512_slli_epi32(upper, SHIFT),
                                                       _mm512_load_si512(sums[c][1][r + i]));
                    }
                });
                fetch(8 * tiles);
                add_super<READ>(totals + first + r, whole, x, row + first + r, at, 0);
            }
        }
    }
};

// totals[r] + x[row + r] . block for `count` rows
template <typename Form>
inline void add_by_tiles(floats (*totals)[32 / LANES], int count, const BlockRows& x, int64_t row,
                         const uint8_t* block) {
    if constexpr (Form::IS_SUPER) {
        SuperTiles<Form> tiles;
        for (Place<Form> at(block); at.group * GROUP < x.inner;) {
            tiles.add(totals, count, x, row, at);
            for (int i = 0; i < SUPER; ++i) at.next();
        }
    }
}
}  // namespace
#endif
