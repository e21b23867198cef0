// Norms, rotations and sums of rows, rounded to bfloat16 wherever transformers' operations round.
#ifndef DRAFTHEAD_NORM
#define DRAFTHEAD_NORM
#include "numbers.h"
#include <cmath>

namespace {
using Vec = at::vec::Vectorized<float>;

inline Vec rounded(const Vec& values) {
    alignas(64) at::BFloat16 some[LANES];
    store(values, some);
    return load(some);
}

// out = weight * x / sqrt(mean of x^2 + eps), for `size` numbers, a multiple of LANES; with
// `plus_one` weights are stored less one, and nothing is rounded before they are multiplied.
inline void rms_norm(const at::BFloat16* x, const at::BFloat16* weight, at::BFloat16* out,
                     int64_t size, float eps, bool plus_one) {
    Vec sum(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec some = load(x + i);
        sum = sum + some * some;
    }
    alignas(64) float sums[LANES];
    sum.store(sums);
    float total = 0;
    for (float one : sums) total += one;
    const Vec share(1 / std::sqrt(total / size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec normed = Vec(load(x + i)) * share, factor = load(weight + i);
        store(plus_one ? normed * (factor + Vec(1)) : rounded(normed) * factor, out + i);
    }
}

// out = x + y, for `size` numbers, a multiple of LANES
inline void add(const at::BFloat16* x, const at::BFloat16* y, at::BFloat16* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) store(Vec(load(x + i)) + Vec(load(y + i)), out + i);
}

// out = x cos + (-second half of x, first half of x) sin; out may be x
inline void rotate(const at::BFloat16* x, const at::BFloat16* cos, const at::BFloat16* sin,
                   at::BFloat16* out, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const Vec first = load(x + i), second = load(x + half + i);
        auto turned = [&](int64_t at, const Vec& own, const Vec& other) {
            return rounded(own * Vec(load(cos + at))) + rounded(other * Vec(load(sin + at)));
        };
        const Vec low = turned(i, first, second.neg()), high = turned(half + i, second, first);
        store(low, out + i);
        store(high, out + half + i);
    }
}

// cos and sin [size] of position * frequencies [size / 2], each twice, times `scale`
inline void rotations(float position, const float* frequencies, float scale, at::BFloat16* cos,
                      at::BFloat16* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const Vec angle = Vec::loadu(frequencies + i) * Vec(position);
        const Vec cosine = angle.cos() * Vec(scale), sine = angle.sin() * Vec(scale);
        for (int64_t start : {i, half + i}) {
            store(cosine, cos + start);
            store(sine, sin + start);
        }
    }
}
}  // namespace
#endif
