#ifndef DRAFTHEAD_LINEAR
#define DRAFTHEAD_LINEAR
#include "blocks.h"
#include "products.h"

// Decoding multiplies each weight with one row, or one row a tree node, so a pass is as fast as
// weights come from memory. Every row is summed in the same order whatever the number of rows: its
// product has the same bits in a pass over one token as in a pass over a tree.
namespace {
// f(first row, number of rows, what to fetch) for groups of rows that are multiplied together with
// the `values` of a block
template <typename Rows, typename F>
inline void for_groups(int64_t rows, const at::BFloat16* block, int64_t values, const F& f) {
    if constexpr (std::is_same_v<Rows, BlockRows>) {
        const int64_t group = rows ? group_size(rows, BlockRows::MOST) : 1;
        for (int64_t r = 0; r < rows; r += group) f(r, int(std::min(group, rows - r)), Ahead{});
    } else {
        in_groups_ahead<Rows::LINES>(rows, block, values, f);
    }
}

// out [rows, size] = x [rows, inner] weight^T + bias, from blocks of so many values
template <typename Rows>
void linear(const at::BFloat16* x, const at::BFloat16* packed, int64_t values,
            const at::BFloat16* bias, at::BFloat16* out, int64_t rows, int64_t inner, int64_t size,
            int threads) {
    const Rows factors(x, packed, rows, inner, threads);
    for_blocks(size, threads, [&](int64_t start) {
        const auto* block = packed + start / 32 * values;
        const auto* biases = bias ? bias + start : nullptr;
        const int columns = std::min<int64_t>(32, size - start);
        for_groups<Rows>(rows, block, values, [&](int64_t r, auto count, Ahead ahead) {
            multiply(count, factors, r, block, biases, out + r * size + start, size, columns,
                     ahead);
        });
    });
}
}  // namespace
#endif
