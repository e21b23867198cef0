// Rows of bfloat16 numbers, as they are.
#ifndef DRAFTHEAD_BFLOAT16_ROWS
#define DRAFTHEAD_BFLOAT16_ROWS
#include "numbers.h"

namespace {
struct Bfloat16Rows {
    static constexpr int LINES = 8;  // of weights for 8 values of x
    const at::BFloat16* x;
    int64_t inner;

    Bfloat16Rows(const at::BFloat16* x, int64_t, int64_t inner, int) : x(x), inner(inner) {}

    int64_t block_size() const { return 32 * inner; }
};
}  // namespace
#endif
