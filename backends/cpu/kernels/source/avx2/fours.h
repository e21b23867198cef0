// Fours of whole numbers, as weights are packed, times four numbers of a row.
#ifndef DRAFTHEAD_FOURS
#define DRAFTHEAD_FOURS
#include "numbers.h"

namespace {
inline __m256i eight(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

#ifdef __AVXVNNI__
constexpr int SHIFT = 128;  // which makes rows positive, as the instruction reads them

struct Fours {
    __m256i all;
    Fours() = default;
    explicit Fours(const void* from) : all(eight(from)) {}
};

inline __m256i add_products(__m256i sums, __m256i row, const Fours& fours) {
    return _mm256_dpbusd_avx_epi32(sums, row, fours.all);
}
#else
constexpr int SHIFT = 0;

struct Fours {
    __m256i sizes, signs;
    Fours() = default;
    explicit Fours(const void* from)
        : sizes(_mm256_abs_epi8(eight(from))),
          signs(_mm256_cmpgt_epi8(_mm256_setzero_si256(), eight(from))) {}
};

// Sums of two products, of numbers up to 127, have 16 bits. Where a weight is negative its size is
// multiplied by -x - 1, and not by -x: sums start with what that is less.
inline __m256i add_products(__m256i sums, __m256i row, const Fours& fours) {
    const __m256i twos = _mm256_maddubs_epi16(fours.sizes, _mm256_xor_si256(row, fours.signs));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
    asm volatile("" : "+x"(sums));  // one after the other, or the compiler runs out of registers
    return sums;
}
#endif
}  // namespace
#endif
