#ifndef DRAFTHEAD_GATED_MLP
#define DRAFTHEAD_GATED_MLP
#include "linear.h"
#include "silu.h"

namespace {
// out [rows, size] = silu(x gate^T) * (x up^T), from blocks of both weights in turn
template <typename Rows>
void gated(const at::BFloat16* x, const at::BFloat16* packed, int64_t values, at::BFloat16* out,
           int64_t rows, int64_t inner, int64_t size, int threads) {
    constexpr int MOST = std::max(MOST_ROWS, BlockRows::MOST);
    const Rows factors(x, packed, rows, inner, threads);
    for_blocks(size, threads, [&](int64_t start) {
        const auto* block = packed + start / 16 * values;
        auto multiply_group = [&](int64_t r, auto count, Ahead ahead) {
            at::BFloat16 gate[MOST * 32], up[MOST * 32];
            multiply(count, factors, r, block, nullptr, gate, 32, 32, ahead);
            multiply(count, factors, r, block + values, nullptr, up, 32, 32,
                     ahead.after(factors.inner));
            for (int i = 0; i < 32 * count; i += LANES) {
                silu_times(gate + i, up + i, out + (r + i / 32) * size + start + i % 32);
            }
        };
        for_groups<Rows>(rows, block, 2 * values, multiply_group);
    });
}
}  // namespace
#endif
