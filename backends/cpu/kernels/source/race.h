#ifndef DRAFTHEAD_RACE
#define DRAFTHEAD_RACE
#include "common.h"
#include <cmath>

namespace {
// See `arrival_times` and `race` in core/sampling.py.
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9,
                   MIX_2 = 0x94D049BB133111EB;

inline float uniform(uint64_t key, int64_t token) {
    uint64_t bits = (key + uint64_t(token) + 1) * GOLDEN;
    bits = (bits ^ (bits >> 30)) * MIX_1;
    bits = (bits ^ (bits >> 27)) * MIX_2;
    bits ^= bits >> 31;
    return float(int64_t(bits >> 1)) * 0x1p-63f + 0x1p-64f;
}

// The token that is fastest so far.
struct Race {
    float speed = 0;
    int64_t token = -1;

    void enter(int64_t other, float mass, float uniform) {
        const float time = -std::log1p(-std::min(uniform, 1 - 0x1p-24f));
        if (mass / time > speed) speed = mass / time, token = other;
    }

    // Those of eight tokens from `start` on whose bit is set.
    void enter_some(unsigned some, int64_t start, const float* masses, const float* uniforms) {
        for (; some; some &= some - 1) {
            const int64_t i = __builtin_ctz(some);
            enter(start + i, masses[i], uniforms[i]);
        }
    }
};

// How many tokens have at least some mass, and the sum of their masses.
struct Within { int64_t count; float mass; };
}  // namespace
#endif
