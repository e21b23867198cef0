// Products of any number of rows by tiles, a group of rows at a time.
#ifndef DRAFTHEAD_PRODUCTS
#define DRAFTHEAD_PRODUCTS
#include "multiply.h"
#include "multiply_int8.h"

namespace {
// f(first column) for each block of 32 of `size` columns, shared out to threads
template <typename F>
inline void for_blocks(int64_t size, int threads, const F& f) {
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for schedule(static)
        for (int64_t start = 0; start < size; start += 32) f(start);
        _tile_release();  // or each change of threads would save tiles
    }
}

// f(first row, number of rows, what to fetch) for groups of rows that are multiplied with `values`
// weights together, which are LINES cache lines for every eight values of a row.
template <int LINES, typename F>
inline void in_groups_ahead(int64_t rows, const at::BFloat16* weights, int64_t values,
                            const F& f) {
    if (rows == 0) return;
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, group = group_size(rows, MOST_ROWS);
    // One group fetches what it needs itself soon. The first of several finds the weights in the
    // cache, and all fetch a part of the next weights, so that memory is read all the time.
    const int parts = groups >= 8 ? LINES : groups >= 4 ? 4 : groups >= 2 ? 2 : 1;
    const auto* start = weights + (groups == 1 ? DISTANCE : values);
    for (int64_t number = 0; number < groups; ++number) {
        const int lines = number < parts ? LINES / parts : 0;
        const int64_t r = number * group;
        f(r, int(std::min(group, rows - r)), Ahead{start + number * (values / parts), lines});
    }
}
}  // namespace
#endif
