// Products of any number of rows, a group of rows at a time.
#ifndef DRAFTHEAD_PRODUCTS
#define DRAFTHEAD_PRODUCTS
#include "multiply.h"
#include "multiply_int8.h"

namespace {
// f(first column) for each block of 32 of `size` columns, shared out to threads
template <typename F>
inline void for_blocks(int64_t size, int threads, const F& f) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < size; start += 32) f(start);
}

// f(first row, number of rows as a constant, what to fetch) for groups of rows that are multiplied
// with `values` weights together, which are LINES cache lines for every eight values of a row.
template <int LINES, typename F>
inline void in_groups_ahead(int64_t rows, const at::BFloat16* weights, int64_t values,
                            const F& f) {
    if (rows <= MOST_ROWS) {
        // Made here, so that the compiler knows the number of lines.
        with_rows<MOST_ROWS>(rows, [&](auto count) {
            f(0, count, Ahead{weights + distance_of(values), LINES});
        });
        return;
    }
    // The first group finds the weights in the cache. All groups fetch a part of the next weights,
    // so that memory is read all the time.
    const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const int parts = std::min(LINES, groups >= 8 ? 8 : groups >= 4 ? 4 : 2);
    int group = 0;
    in_groups<GROUP_ROWS>(rows, [&](int64_t r, auto count) {
        const int lines = group < parts ? LINES / parts : 0;
        f(r, count, Ahead{weights + values + group * (values / parts), lines});
        ++group;
    });
}
}  // namespace
#endif
