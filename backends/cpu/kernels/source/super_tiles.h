// Tiles for many rows, of which these processors have none.
#ifndef DRAFTHEAD_SUPER_TILES
#define DRAFTHEAD_SUPER_TILES

namespace {
constexpr int FEW_FOR_TILES = 0;

template <typename Form>
inline void add_by_tiles(floats (*)[32 / LANES], int, const BlockRows&, int64_t, const uint8_t*) {}
}  // namespace
#endif
