// Products that fetch the weights of those that follow.
#ifndef DRAFTHEAD_AHEAD
#define DRAFTHEAD_AHEAD
#include "common.h"

namespace {
// Values of one block of 32 columns, counted in bfloat16.
template <bool IN_BYTES>
inline int64_t block_size(int64_t inner) { return IN_BYTES ? 16 * inner + 64 : 32 * inner; }

// What products fetch for those that follow: `lines` cache lines from `start` on for every eight
// values of x, of which there is one line each.
struct Ahead {
    const at::BFloat16* start;
    int lines;

    // What the next product goes on with, after one of `inner` values of x.
    Ahead after(int64_t inner) const { return {start + inner / 8 * lines * 32, lines}; }
};
}  // namespace
#endif
