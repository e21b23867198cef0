#ifndef DRAFTHEAD_MASSES
#define DRAFTHEAD_MASSES
#include "numbers.h"
#include "race.h"
#include <vector>

namespace {
// `uniform` of eight tokens; `bits` is that of the scalar version before it is mixed.
inline __m256 uniforms(__m512i bits) {
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(int64_t(MIX_1)));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(int64_t(MIX_2)));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31));
    const __m256 numbers = _mm512_cvtepi64_ps(_mm512_srli_epi64(bits, 1));
    return _mm256_add_ps(_mm256_mul_ps(numbers, _mm256_set1_ps(0x1p-63f)),
                         _mm256_set1_ps(0x1p-64f));
}

// masses = exp((logit - largest) / temperature), 0 after the last token; returns their sum.
template <typename logit_t>
inline double weigh_all(const logit_t* logits, int64_t size, float temperature,
                        std::vector<float>& masses) {
    __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t start = 0; start < size; start += 16) {
        const auto some = first(size - start);
        most = _mm512_mask_max_ps(most, some, most, load(logits + start, some));
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    const __m512 heat = _mm512_set1_ps(temperature);
    __m512d low = _mm512_setzero_pd(), high = low;
    masses.resize((size + 15) / 16 * 16);
    for (int64_t start = 0; start < size; start += 16) {
        const auto some = first(size - start);
        const __m512 below = _mm512_sub_ps(load(logits + start, some), largest);
        const at::vec::Vectorized<float> scaled = _mm512_div_ps(below, heat);
        const __m512 mass = _mm512_maskz_mov_ps(some, scaled.exp());
        _mm512_storeu_ps(&masses[start], mass);
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(mass)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(mass, 1)));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

// The token that wins the race of all of them.
inline int64_t winner(const std::vector<float>& masses, int64_t size, uint64_t key) {
    Race race;
    const __m512i step = _mm512_set1_epi64(int64_t(8 * GOLDEN));
    const __m512i numbers = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1);
    __m512i bits = _mm512_add_epi64(
        _mm512_set1_epi64(int64_t(key * GOLDEN)),
        _mm512_mullo_epi64(numbers, _mm512_set1_epi64(int64_t(GOLDEN))));
    for (int64_t start = 0; start < size; start += 8, bits = _mm512_add_epi64(bits, step)) {
        const __m256 mass = _mm256_loadu_ps(&masses[start]), u = uniforms(bits);
        // No time is shorter than its uniform number.
        const __m256 bound = _mm256_mul_ps(u, _mm256_set1_ps(race.speed));
        const unsigned faster = _mm256_cmp_ps_mask(mass, bound, _CMP_GT_OQ);
        if (!faster) continue;
        alignas(32) float eight[8];
        _mm256_store_ps(eight, u);
        race.enter_some(faster, start, &masses[start], eight);
    }
    return race.token;
}

// Which of sixteen tokens from `start` on have at least the mass `bound`.
inline unsigned within(const std::vector<float>& masses, int64_t size, int64_t start,
                       float bound) {
    const __m512 sixteen = _mm512_loadu_ps(&masses[start]);
    return _mm512_mask_cmp_ps_mask(first(size - start), sixteen, _mm512_set1_ps(bound),
                                   _CMP_GE_OQ);
}

// Those of all tokens that have at least the mass `bound`.
inline Within all_within(const std::vector<float>& masses, int64_t size, float bound) {
    int64_t count = 0;
    __m512 mass = _mm512_setzero_ps();
    for (int64_t start = 0; start < size; start += 16) {
        const unsigned some = within(masses, size, start, bound);
        count += __builtin_popcount(some);
        mass = _mm512_mask_add_ps(mass, (__mmask16)some, mass, _mm512_loadu_ps(&masses[start]));
    }
    return {count, _mm512_reduce_add_ps(mass)};
}
}  // namespace
#endif
