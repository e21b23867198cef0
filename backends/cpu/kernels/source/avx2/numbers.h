// Eight numbers at a time, for processors with AVX2 and FMA.
#ifndef DRAFTHEAD_NUMBERS
#define DRAFTHEAD_NUMBERS
#include "common.h"
#include <cstring>
#include <limits>

namespace {
constexpr int LANES = 8;
using floats = __m256;
using ints = __m256i;

inline __m256 widen(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// The first `count` of eight numbers as float32, 0 for the others.
inline __m256 load(const at::BFloat16* from, int64_t count = 8) {
    if (count >= 8) return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    alignas(16) at::BFloat16 some[8] = {};
    std::memcpy(some, from, std::max<int64_t>(count, 0) * sizeof(*from));
    return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(some)));
}

inline __m256 load(const float* from, int64_t count = 8) {
    if (count >= 8) return _mm256_loadu_ps(from);
    alignas(32) float some[8] = {};
    std::memcpy(some, from, std::max<int64_t>(count, 0) * sizeof(*from));
    return _mm256_load_ps(some);
}

// Stores the first `count` of eight numbers, rounded to bfloat16: to the nearest, or of two to the
// even one. A number that is none becomes another that is none.
inline void store(__m256 values, at::BFloat16* to, int64_t count = 8) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 none = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(none));
    rounded = _mm256_srli_epi32(rounded, 16);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                                            _mm256_extracti128_si256(rounded, 1));
    if (count >= 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
    } else {
        std::memcpy(to, &halves, std::max<int64_t>(count, 0) * sizeof(*to));
    }
}

inline void store(__m256 values, float* to) { _mm256_storeu_ps(to, values); }

// Stores eight numbers up to 127, rounded to whole ones, with `shift` added.
inline void store_bytes(__m256 values, int shift, uint8_t* to) {
    __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(values), _mm256_set1_epi32(shift));
    whole = _mm256_and_si256(whole, _mm256_set1_epi32(0xff));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(whole),
                                            _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
}

// Of pairs of numbers a and b, S places apart, a + b and a - b.
template <int S>
inline __m256 sums_and_differences(__m256 values) {
    constexpr int SECOND = S == 1 ? 0xaa : S == 2 ? 0xcc : 0xf0;
    const __m256i places = _mm256_setr_epi32(0 ^ S, 1 ^ S, 2 ^ S, 3 ^ S, 4 ^ S, 5 ^ S, 6 ^ S, 7 ^ S);
    const __m256 other = _mm256_permutevar8x32_ps(values, places);
    return _mm256_blend_ps(_mm256_add_ps(other, values), _mm256_sub_ps(other, values), SECOND);
}

// The larger of the bits of sizes, which are in the order of these, and before those of no number.
inline __m256i larger(__m256i bits, __m256 values) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    return _mm256_max_epi32(bits, _mm256_and_si256(_mm256_castps_si256(values), size));
}

// Which of the first `count` of eight numbers are larger than `bound`.
inline unsigned above(const float* from, int64_t count, float bound) {
    const __m256 larger = _mm256_cmp_ps(load(from, count), _mm256_set1_ps(bound), _CMP_GT_OQ);
    return _mm256_movemask_ps(larger) & (count < 8 ? (1u << count) - 1 : 0xff);
}

inline float sum_of(__m256 values) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float max_of(__m256 values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// e^x for x of at most 0, within two units of the last place; 0 below -87.
inline __m256 exp_of(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.0f);
    const __m256 is_tiny = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    x = _mm256_max_ps(least, x);  // NaN stays NaN: of two, the second is returned
    // x = n log 2 + r, with |r| of at most log 2 / 2; n log 2 is subtracted in two parts.
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    // Cephes' polynomial of e^r.
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                         5.0000001201e-1f}) {
        y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(factor));
    }
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1));
    const __m256i power = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(is_tiny, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}
}  // namespace
#endif
