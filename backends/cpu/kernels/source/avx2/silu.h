#ifndef DRAFTHEAD_SILU
#define DRAFTHEAD_SILU
#include "numbers.h"

namespace {
// out[0..7] = silu(gate) * up, rounded where two operations would round; gate is overwritten.
inline void silu_times(at::BFloat16* gate, const at::BFloat16* up, at::BFloat16* out) {
    // x / (1 + e^-x) is also x e^x / (1 + e^x): of the two, the one whose power is at most 1.
    const __m256 x = load(gate), sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1);
    const __m256 power = exp_of(_mm256_or_ps(x, sign));
    const __m256 above = _mm256_blendv_ps(one, power, x);  // by the sign of x
    const __m256 silu = _mm256_div_ps(_mm256_mul_ps(x, above), _mm256_add_ps(one, power));
    store(silu, gate);
    store(_mm256_mul_ps(load(gate), load(up)), out);
}
}  // namespace
#endif
