#ifndef DRAFTHEAD_LINEAR
#define DRAFTHEAD_LINEAR
#include "multiply.h"

namespace {
// out [rows, size] = x [rows, inner] weight^T + bias
void linear(const at::BFloat16* x, const at::BFloat16* packed, const at::BFloat16* bias,
            at::BFloat16* out, int64_t rows, int64_t inner, int64_t size, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < size; start += 32) {
        const auto* block = packed + start * inner;
        const auto* biases = bias ? bias + start : nullptr;
        const int columns = std::min<int64_t>(32, size - start);
        in_groups_ahead(rows, block, 32 * inner, [&](int64_t r, auto count, Ahead ahead) {
            multiply<count()>(x + r * inner, inner, block, biases, out + r * size + start, size,
                              columns, ahead);
        });
    }
}
}  // namespace
#endif
