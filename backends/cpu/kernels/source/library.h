// What takes longest to compile, for all graphs of all models: they call it by its declarations.
#include "declared.h"
#include "linear.h"
#include "gated_mlp.h"

namespace DRAFTHEAD_LIBRARY {
void linear(const at::BFloat16* x, const at::BFloat16* packed, const at::BFloat16* bias,
            at::BFloat16* out, int64_t rows, int64_t inner, int64_t size, bool in_bytes,
            int threads) {
    const auto function = in_bytes ? ::linear<true> : ::linear<false>;
    function(x, packed, bias, out, rows, inner, size, threads);
}

void gated(const at::BFloat16* x, const at::BFloat16* packed, at::BFloat16* out, int64_t rows,
           int64_t inner, int64_t size, bool in_bytes, int threads) {
    const auto function = in_bytes ? ::gated<true> : ::gated<false>;
    function(x, packed, out, rows, inner, size, threads);
}
}  // namespace DRAFTHEAD_LIBRARY
