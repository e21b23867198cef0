#ifndef DRAFTHEAD_GATED_MLP
#define DRAFTHEAD_GATED_MLP
#include "products.h"
#include "silu.h"

namespace {
// out [rows, size] = silu(x gate^T) * (x up^T), from blocks of both weights in turn
template <typename Rows>
void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, int threads) {
    const Rows factors(x, rows, inner, threads);
    const int64_t values = factors.block_size();
    for_blocks(size, threads, [&](int64_t start) {
        const auto* block = packed + start / 16 * values;
        auto multiply_group = [&](int64_t r, auto count, Ahead ahead) {
            at::BFloat16 gate[MOST_ROWS * 32], up[MOST_ROWS * 32];
            multiply(count, factors, r, block, nullptr, gate, 32, 32, ahead);
            multiply(count, factors, r, block + values, nullptr, up, 32, 32,
                     ahead.after(factors.inner));
            for (int i = 0; i < 32 * count; i += LANES) {
                silu_times(gate + i, up + i, out + (r + i / 32) * size + start + i % 32);
            }
        };
        in_groups_ahead<Rows::LINES>(rows, block, 2 * values, multiply_group);
    });
}
}  // namespace
#endif
