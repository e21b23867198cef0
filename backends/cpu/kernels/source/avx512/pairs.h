// Pairs of bfloat16 numbers, as weights are packed, times two numbers of a row; the second product is
// added first. By one instruction, or in float32 by two for which each pair is taken apart.
#ifndef DRAFTHEAD_PAIRS
#define DRAFTHEAD_PAIRS
#include "bfloat16_rows.h"

namespace {
#ifdef __AVX512BF16__
struct Pairs {
    __m512bh both;
    Pairs() = default;
    explicit Pairs(__m512i bits) : both((__m512bh)bits) {}
};

// Two numbers of a row, repeated sixteen times.
struct Two {
    __m512bh both;
    explicit Two(const number_t* from)
        : both((__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(from))) {}
};

inline __m512 add_products(__m512 sums, const Two& row, const Pairs& pairs) {
    return _mm512_dpbf16_ps(sums, row.both, pairs.both);
}

// Stores sixteen numbers, of every two the second first.
inline void store_swapped(__m512 values, number_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_rol_epi32(narrow(values), 16));
}
#else
struct Pairs {
    __m512 first, second;
    Pairs() = default;
    explicit Pairs(__m512i bits)
        : first((__m512)_mm512_slli_epi32(bits, 16)),
          second((__m512)_mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xffff0000)))) {}
};

struct Two {
    __m512 first, second;
    explicit Two(const number_t* from)
        : first(_mm512_set1_ps(from[0])), second(_mm512_set1_ps(from[1])) {}
};

inline __m512 add_products(__m512 sums, const Two& row, const Pairs& pairs) {
    sums = _mm512_fmadd_ps(row.second, pairs.second, sums);
    return _mm512_fmadd_ps(row.first, pairs.first, sums);
}

inline void store_swapped(__m512 values, number_t* to) {
    _mm512_storeu_ps(to, _mm512_permute_ps(values, 0xb1));
}
#endif
}  // namespace
#endif
