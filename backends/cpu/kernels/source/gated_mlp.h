#ifndef DRAFTHEAD_GATED_MLP
#define DRAFTHEAD_GATED_MLP
#include "products.h"
#include "silu.h"

namespace {
// out [rows, size] = silu(x gate^T) * (x up^T), from blocks of both weights in turn
template <bool IN_BYTES>
void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, int threads) {
    const Factors<IN_BYTES> factors(x, rows, inner);
    const int64_t values = block_size<IN_BYTES>(inner);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < size; start += 32) {
        const auto* block = packed + start / 16 * values;
        in_groups_ahead<IN_BYTES>(rows, block, 2 * values, [&](int64_t r, auto count, Ahead ahead) {
            at::BFloat16 gate[count() * 32], up[count() * 32];
            multiply<count(), IN_BYTES>(factors.row(r), inner, factors.totals(r), block, nullptr,
                                        gate, 32, 32, ahead);
            multiply<count(), IN_BYTES>(factors.row(r), inner, factors.totals(r), block + values,
                                        nullptr, up, 32, 32, ahead.after(inner));
            for (int i = 0; i < 32 * count(); i += LANES) {
                silu_times(gate + i, up + i, out + (r + i / 32) * size + start + i % 32);
            }
        });
    }
}
}  // namespace
#endif
