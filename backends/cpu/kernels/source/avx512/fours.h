// Fours of whole numbers, as weights are packed, times four numbers of a row.
#ifndef DRAFTHEAD_FOURS
#define DRAFTHEAD_FOURS
#include "numbers.h"

namespace {
#ifdef __AVX512VNNI__
constexpr int SHIFT = 128;  // which makes rows positive, as the instruction reads them

struct Fours {
    __m512i all;
    explicit Fours(__m512i all) : all(all) {}
};

inline __m512i add_products(__m512i sums, __m512i row, const Fours& fours) {
    return _mm512_dpbusd_epi32(sums, row, fours.all);
}
#else
constexpr int SHIFT = 0;

struct Fours {
    __m512i sizes, signs;
    explicit Fours(__m512i all)
        : sizes(_mm512_abs_epi8(all)), signs(_mm512_movm_epi8(_mm512_movepi8_mask(all))) {}
};

// Sums of two products, of numbers up to 127, have 16 bits. Where a weight is negative its size is
// multiplied by -x - 1, and not by -x: sums start with what that is less.
inline __m512i add_products(__m512i sums, __m512i row, const Fours& fours) {
    const __m512i twos = _mm512_maddubs_epi16(fours.sizes, _mm512_xor_si512(row, fours.signs));
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
    asm volatile("" : "+v"(sums));  // one after the other, or the compiler runs out of registers
    return sums;
}
#endif
}  // namespace
#endif
