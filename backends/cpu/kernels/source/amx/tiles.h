// Registers of 16 rows of 64 bytes, and the rows that are used.
#ifndef DRAFTHEAD_TILES
#define DRAFTHEAD_TILES
#include "numbers.h"

namespace {
constexpr int TILE = 16;

// What the processor reads of tiles: 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.
struct Shapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16];

    // The first rows of x, up to 16, and those beyond; never 0, which the processor refuses.
    Shapes(uint8_t a, uint8_t b) : rows{a, a, b, b, a, b, TILE, TILE} {}
};

// Makes what was written before seen by tiles, whose instructions do not tell the compiler what they
// read.
inline void written_for_tiles() { asm volatile("" ::: "memory"); }
}  // namespace
#endif
