#ifndef DRAFTHEAD_SILU
#define DRAFTHEAD_SILU
#include "numbers.h"

namespace {
// out[0..15] = silu(gate) * up, rounded where two operations would round; gate is overwritten.
inline void silu_times(at::BFloat16* gate, const at::BFloat16* up, at::BFloat16* out) {
    using Vec = at::vec::Vectorized<float>;
    Vec x = load(gate);
    store(x / (Vec(1) + x.neg().exp()), gate);
    store(_mm512_mul_ps(load(gate), load(up)), out);
}
}  // namespace
#endif
