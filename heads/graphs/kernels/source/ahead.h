// Products of many rows, which fetch the weights of those that follow.
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

// f(first row, number of rows as a constant, what to fetch) for groups of rows that are multiplied
// with `values` weights together. Where one group is all, it fetches what is `distance` values away.
template <bool IN_BYTES, int MOST, int GROUP, typename F>
inline void in_groups_ahead(int64_t rows, const at::BFloat16* weights, int64_t values,
                            int64_t distance, const F& f) {
    constexpr int LINES = IN_BYTES ? 4 : 8;
    if (rows <= MOST) {
        const Ahead ahead{weights + distance, LINES};
        with_rows<MOST>(rows, [&](auto count) { f(0, count, ahead); });
        return;
    }
    // The first group finds the weights in the cache. All groups fetch a part of the next weights,
    // so that memory is read all the time.
    const int64_t groups = (rows + GROUP - 1) / GROUP;
    const int parts = std::min(LINES, groups >= 8 ? 8 : groups >= 4 ? 4 : 2);
    int group = 0;
    in_groups<GROUP>(rows, [&](int64_t r, auto count) {
        const int lines = group < parts ? LINES / parts : 0;
        f(r, count, Ahead{weights + values + group * (values / parts), lines});
        ++group;
    });
}
}  // namespace
#endif
