// Functions of the library, see `library.h`.
#ifndef DRAFTHEAD_DECLARED
#define DRAFTHEAD_DECLARED
#include <cstdint>

namespace DRAFTHEAD_LIBRARY {
// out [rows, size] = x [rows, inner] weight^T + bias
void linear(const at::BFloat16* x, const at::BFloat16* packed, const at::BFloat16* bias,
            at::BFloat16* out, int64_t rows, int64_t inner, int64_t size, bool in_bytes,
            int threads);
// out [rows, size] = silu(x gate^T) * (x up^T), from blocks of both weights in turn
void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, bool in_bytes, int threads);
}  // namespace DRAFTHEAD_LIBRARY
#endif
