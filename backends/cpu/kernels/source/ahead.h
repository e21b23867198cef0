// Products that fetch the weights of those that follow.
#ifndef DRAFTHEAD_AHEAD
#define DRAFTHEAD_AHEAD
#include "common.h"

namespace {
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
