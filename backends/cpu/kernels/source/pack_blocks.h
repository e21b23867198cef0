// Weights in blocks of a file in the order in which `blocks.h` multiplies them.
#ifndef DRAFTHEAD_PACK_BLOCKS
#define DRAFTHEAD_PACK_BLOCKS
#include "blocks.h"

namespace {
using Bytes = uint64_t;  // eight at a time

inline Bytes eight(const uint8_t* from) {
    Bytes some;
    std::memcpy(&some, from, sizeof(some));
    return some;
}

// `count` bits from `place` on of each of eight bytes
inline Bytes bits_of(Bytes some, int place, int count) {
    return some >> place & 0x0101010101010101u * ((1 << count) - 1);
}

// The numbers from 0 of a group of a block of a file, and where its scales are.
template <typename Form>
inline void read_group(const uint8_t* block, int group, uint8_t* to) {
    constexpr int BITS = Form::BITS, HEAD = Form::HAS_MINIMA ? 4 : 2;
    for (int i = 0; i < GROUP; i += 8) {
        Bytes some;
        if constexpr (BITS == 6) {
            const int half = group / 4, quarter = group % 4;
            some = bits_of(eight(block + half * 64 + quarter % 2 * 32 + i), quarter / 2 * 4, 4) |
                   bits_of(eight(block + 128 + half * 32 + i), 2 * quarter, 2) << 4;
        } else if constexpr (Form::IS_SUPER) {
            const uint8_t *upper = block + 16, *lower = upper + (BITS - 4) * 32;
            some = bits_of(eight(lower + group / 2 * 32 + i), group % 2 * 4, 4);
            if constexpr (BITS == 5) some |= bits_of(eight(upper + i), group, 1) << 4;
        } else if constexpr (BITS == 8) {
            some = eight(block + HEAD + i) ^ 0x8080808080808080u;
        } else {
            some = bits_of(eight(block + HEAD + (BITS - 4) * 4 + i % 16), i / 16 * 4, 4);
            if constexpr (BITS == 5) {  // one bit to each byte
                const Bytes fifth = block[HEAD + i / 8] * 0x0101010101010101u & 0x8040201008040201u;
                some |= ((fifth + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u);
            }
        }
        std::memcpy(to + i, &some, sizeof(some));
    }
}

// Packs the numbers of a group of a column.
template <int BITS>
inline void write_numbers(const uint8_t* numbers, uint8_t* to) {
    uint32_t fours[8], lines[8] = {};
    std::memcpy(fours, numbers, sizeof(fours));
    for (int i = 0; i < 8; ++i) {
        if constexpr (BITS == 8) {
            lines[i] = fours[i];
        } else {
            constexpr int MORE = BITS - 4;
            lines[i / 2] |= (fours[i] & 0x0f0f0f0fu) << i % 2 * 4;
            lines[4 + i * MORE / 8] |= (fours[i] >> 4 & 0x0f0f0f0fu) << i * MORE % 8;
        }
    }
    for (int i = 0; i < BITS; ++i) std::memcpy(to + i * 4 * GROUP, lines + i, 4);
}

// Packs scales and minima of a group of a column.
template <typename Form>
inline void write_scales(const uint8_t* block, int group, int column, uint8_t* head,
                         uint8_t* own) {
    uint8_t* whole = head + Form::FACTORS;
    if constexpr (!Form::IS_SUPER) {
        std::memcpy(own + 2 * column, block, 2);
        if constexpr (Form::HAS_MINIMA) {
            std::memcpy(own + LINE + 2 * column, block + 2, 2);
            own[LINE + 2 * column + 1] ^= 0x80;  // it is added in a file
        }
    } else if constexpr (Form::HAS_MINIMA) {
        for (int i : {0, 1}) std::memcpy(head + i * LINE + 2 * column, block + 2 * i, 2);
        const uint8_t* packed = block + 4;  // six bits each
        const int at = group % 4, last = packed[8 + at];
        const int scale = packed[at], minimum = packed[4 + at];
        uint8_t* minima = whole + SUPER * 32 + group / 4 * 32 * 4;
        whole[group * 32 + column] = group < 4 ? scale & 63 : (last & 15) | (scale >> 6) << 4;
        minima[4 * column + at] = group < 4 ? minimum & 63 : last >> 4 | (minimum >> 6) << 4;
    } else {
        std::memcpy(head + 2 * column, block + 208, 2);
        for (int i : {0, 1}) whole[(2 * group + i) * 32 + column] = block[192 + 2 * group + i];
    }
}

// Packs 32 columns of blocks [columns, row bytes] of a file; those beyond `columns` are zeros.
template <typename Form>
inline void pack_columns(int kind, const uint8_t* raw, int64_t row, int columns, int64_t groups,
                         uint8_t* to) {
    constexpr int SHARE = Form::IS_SUPER ? SUPER : 1;
    std::memset(to, 0, Form::bytes(groups));
    *to = kind;
    uint8_t *own = to + LINE, *head = own;
    for (int64_t g = 0; g < groups; ++g, own += Form::SCALES + Form::NUMBERS) {
        if (Form::IS_SUPER && g % SUPER == 0) {
            head = own;
            own += Form::HEAD;
        }
        for (int c = 0; c < columns; ++c) {
            const uint8_t* block = raw + c * row + g / SHARE * Form::RAW;
            uint8_t numbers[GROUP];
            read_group<Form>(block, g % SHARE, numbers);
            write_numbers<Form::BITS>(numbers, own + Form::SCALES + 4 * c);
            write_scales<Form>(block, g % SHARE, c, head, own);
        }
    }
}
}  // namespace
#endif
