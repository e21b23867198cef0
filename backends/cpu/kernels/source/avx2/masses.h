#ifndef DRAFTHEAD_MASSES
#define DRAFTHEAD_MASSES
#include "numbers.h"
#include "race.h"
#include <vector>

namespace {
// masses = exp((logit - largest) / temperature), 0 after the last token; returns their sum.
template <typename logit_t>
inline double weigh_all(const logit_t* logits, int64_t size, float temperature,
                        std::vector<float>& masses) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    __m256 most = _mm256_set1_ps(NOTHING);
    int64_t start = 0;
    for (; start + 8 <= size; start += 8) most = _mm256_max_ps(most, load(logits + start));
    float largest = max_of(most);
    for (; start < size; ++start) largest = std::max(largest, float(logits[start]));
    masses.resize((size + 7) / 8 * 8);
    const __m256 top = _mm256_set1_ps(largest), heat = _mm256_set1_ps(temperature);
    __m256d low = _mm256_setzero_pd(), high = low;
    for (start = 0; start < size; start += 8) {
        const __m256 below = _mm256_sub_ps(load(logits + start, size - start), top);
        _mm256_storeu_ps(&masses[start], exp_of(_mm256_div_ps(below, heat)));
        for (int64_t i = size; i < start + 8; ++i) masses[i] = 0;
        const __m256 mass = _mm256_loadu_ps(&masses[start]);
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(mass)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(mass, 1)));
    }
    alignas(32) double four[4];
    _mm256_store_pd(four, _mm256_add_pd(low, high));
    return four[0] + four[1] + four[2] + four[3];
}

// The token that wins the race of all of them.
inline int64_t winner(const std::vector<float>& masses, int64_t size, uint64_t key) {
    Race race;
    for (int64_t start = 0; start < size; start += 8) {
        alignas(32) float eight[8];  // which the compiler computes together
        for (int i = 0; i < 8; ++i) eight[i] = uniform(key, start + i);
        // No time is shorter than its uniform number.
        const __m256 bound = _mm256_mul_ps(_mm256_load_ps(eight), _mm256_set1_ps(race.speed));
        const unsigned faster = _mm256_movemask_ps(
            _mm256_cmp_ps(_mm256_loadu_ps(&masses[start]), bound, _CMP_GT_OQ));
        race.enter_some(faster, start, &masses[start], eight);
    }
    return race.token;
}

// Which of eight tokens from `start` on have at least the mass `bound`.
inline unsigned within(const std::vector<float>& masses, int64_t size, int64_t start,
                       float bound) {
    const __m256 enough = _mm256_cmp_ps(_mm256_loadu_ps(&masses[start]), _mm256_set1_ps(bound),
                                        _CMP_GE_OQ);
    return _mm256_movemask_ps(enough) & (size - start < 8 ? (1u << (size - start)) - 1 : 0xff);
}

// Those of all tokens that have at least the mass `bound`.
inline Within all_within(const std::vector<float>& masses, int64_t size, float bound) {
    int64_t count = 0;
    __m256 mass = _mm256_setzero_ps();
    for (int64_t start = 0; start < size; start += 8) {
        count += __builtin_popcount(within(masses, size, start, bound));
        const __m256 eight = _mm256_loadu_ps(&masses[start]);  // 0 after the last token
        const __m256 enough = _mm256_cmp_ps(eight, _mm256_set1_ps(bound), _CMP_GE_OQ);
        mass = _mm256_add_ps(mass, _mm256_and_ps(eight, enough));
    }
    return {count, sum_of(mass)};
}
}  // namespace
#endif
