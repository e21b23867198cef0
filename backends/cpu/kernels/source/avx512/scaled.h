// Products of whole numbers as bfloat16 numbers.
#ifndef DRAFTHEAD_SCALED
#define DRAFTHEAD_SCALED
#include "int8.h"

namespace {
// out[0..15] = sums * scale * scales + bias, of which the first `columns` are stored.
inline void store_scaled(__m512i sums, float scale, const float* scales, const at::BFloat16* bias,
                         at::BFloat16* out, int columns) {
    const __mmask16 some = first(std::max(columns, 0));
    const __m512 both = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_loadu_ps(scales));
    __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), both);
    if (bias) product = _mm512_add_ps(product, load(bias, some));
    store(product, out, some);
}
}  // namespace
#endif
