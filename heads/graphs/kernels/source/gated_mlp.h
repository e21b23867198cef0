#ifndef DRAFTHEAD_GATED_MLP
#define DRAFTHEAD_GATED_MLP
#include "multiply.h"

namespace {
// out[0..15] = silu(gate) * up, rounded where two operations would round; gate is overwritten.
inline void silu_times(at::BFloat16* gate, const at::BFloat16* up, at::BFloat16* out) {
    using Vec = at::vec::Vectorized<float>;
    Vec x = load(gate);
    store(x / (Vec(1) + x.neg().exp()), gate);
    store(_mm512_mul_ps(load(gate), load(up)), out);
}

// out [rows, size] = silu(x gate^T) * (x up^T), from blocks of both weights in turn
template <bool IN_BYTES>
void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, int threads) {
    std::vector<float> totals;
    if constexpr (IN_BYTES) totals = sums_of(x, rows, inner);
    const int64_t values = block_size<IN_BYTES>(inner);
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < size; start += 32) {
        const auto* block = packed + start / 16 * values;
        in_groups_ahead<IN_BYTES>(rows, block, 2 * values, [&](int64_t r, auto count, Ahead ahead) {
            at::BFloat16 gate[count() * 32], up[count() * 32];
            multiply<count(), IN_BYTES>(x + r * inner, inner, totals.data() + r, block, nullptr,
                                        gate, 32, 32, ahead);
            multiply<count(), IN_BYTES>(x + r * inner, inner, totals.data() + r, block + values,
                                        nullptr, up, 32, 32, ahead.after(inner));
            for (int i = 0; i < 2 * count(); ++i) {
                silu_times(gate + i * 16, up + i * 16,
                           out + (r + i / 2) * size + start + i % 2 * 16);
            }
        });
    }
}
}  // namespace
#endif
