#ifndef DRAFTHEAD_LINEAR
#define DRAFTHEAD_LINEAR
#include "products.h"

// Decoding multiplies each weight with one row, or one row a tree node, so a pass is as fast as
// weights come from memory. Every row is summed in the same order whatever the number of rows: its
// product has the same bits in a pass over one token as in a pass over a tree.
namespace {
// out [rows, size] = x [rows, inner] weight^T + bias
template <typename Rows>
void linear(const at::BFloat16* x, const at::BFloat16* packed, const at::BFloat16* bias,
            at::BFloat16* out, int64_t rows, int64_t inner, int64_t size, int threads) {
    const Rows factors(x, rows, inner, threads);
    const int64_t values = factors.block_size();
    for_blocks(size, threads, [&](int64_t start) {
        const auto* block = packed + start / 32 * values;
        const auto* biases = bias ? bias + start : nullptr;
        const int columns = std::min<int64_t>(32, size - start);
        in_groups_ahead<Rows::LINES>(rows, block, values, [&](int64_t r, auto count, Ahead ahead) {
            multiply(count, factors, r, block, biases, out + r * size + start, size, columns,
                     ahead);
        });
    });
}
}  // namespace
#endif
