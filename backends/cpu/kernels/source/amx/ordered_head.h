// What queries see of a head, and its keys and values in the order in which tiles read them.
#ifndef DRAFTHEAD_ORDERED_HEAD
#define DRAFTHEAD_ORDERED_HEAD
#include "attention_parts.h"
#include "tiles.h"
#include <memory>
#include <vector>

namespace {
constexpr int MOST_QUERIES = 128;  // of one head of keys, worked on together
}
#include "queries.h"

namespace {
constexpr int BLOCK = 32;  // values that a product adds up
constexpr int64_t ONCE = 4;  // blocks that few rows put into order at a time, in a cache
alignas(64) const float ZEROS[128] = {};  // also 256 values in bfloat16

inline int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Which of sixteen columns a mask, added to scores, leaves visible.
template <typename mask_t>
inline __mmask16 seen(const mask_t* mask, int64_t columns) {
    const auto some = first(columns);
    return _mm512_mask_cmp_ps_mask(some, load(mask, some), _mm512_set1_ps(HIDDEN), _CMP_NLE_UQ);
}

// What a query sees: `count` columns, the first of which is `from` and the last before `end`, and so
// many whole blocks before the first gap.
struct Sight {
    int64_t from = 0, end = 0, count = 0, whole = 0;

    bool gaps() const { return count < end - from; }
};

template <typename mask_t>
inline Sight sight_of(const mask_t* mask, int64_t columns) {
    Sight sight;
    for (int64_t s = 0; s < columns; s += 16) {
        const unsigned some = seen(mask + s, columns - s);
        if (!some) continue;
        if (!sight.count) sight.from = s + __builtin_ctz(some);
        sight.end = s + 32 - __builtin_clz(some);
        sight.count += __builtin_popcount(some);
        if (!sight.gaps()) sight.whole = sight.count / BLOCK;
    }
    return sight.count ? sight : Sight{0, columns, columns};  // all, where all are hidden
}

// Memory that is taken, and not touched before it is used.
struct Memory {
    std::unique_ptr<__m512i[]> lines;
    int64_t size = 0;

    __m512i* of(int64_t wanted) {
        if (size < wanted) lines.reset(new __m512i[size = wanted]);
        return lines.get();
    }
};

// The keys and values of a head, put into order as far as they are asked for.
template <int D>
class OrderedHead {
  public:
    static constexpr int WIDE = (D + 63) / 64 * 64;  // values of four tiles
    const bool once;  // a pass asks for each column once, and never for earlier ones

    OrderedHead(const at::BFloat16* keys, int64_t key_stride, const at::BFloat16* values,
                int64_t value_stride, int64_t columns, int64_t from, bool once, int64_t room)
        : once(once), keys(keys), values(values), key_stride(key_stride),
          value_stride(value_stride), columns(columns), from(from), turned_to(from),
          paired_to{from, from} {
        static thread_local Memory memory;
        const int64_t each = room * WIDE / 32;
        turned = memory.of(4 * each);
        for (int i : {0, 1}) paired[i] = turned + (once ? 0 : (i + 1) * each);
        gathered = turned + 3 * each;
    }

    // The keys of blocks of 16 columns.
    const __m512i* turned_keys(int64_t column, int64_t end) {
        if (once) from = turned_to = column;
        for (; turned_to < std::min(end, columns); turned_to += 16) {
            const int count = std::min<int64_t>(16, columns - turned_to);
            for (int i = 0; i < count; ++i) {
                for (int d = 0; d < D; d += 32) {  // what is needed next, a cache line at a time
                    _mm_prefetch((const char*)(value(turned_to + i) + d), _MM_HINT_T1);
                }
            }
            turn_keys<D>(keys + turned_to * key_stride, key_stride, count,
                         turned + (turned_to - from) * D / 32);
        }
        return turned + (column - from) * D / 32;
    }

    // The values of blocks of columns that lie next to each other.
    const __m512i* pairs(int64_t column, int64_t blocks) {
        const int64_t odd = column % 2;
        if (once) from = paired_to[odd] = column - odd;
        for (int64_t& c = paired_to[odd]; c + odd < column + blocks * BLOCK; c += 2) {
            pair(value(c + odd), value(c + odd + 1), paired[odd] + (c - from) * WIDE / 32);
        }
        return paired[odd] + (column - odd - from) * WIDE / 32;
    }

    // The values of the columns that a query sees from `column` on.
    template <typename mask_t>
    const __m512i* pairs_seen(const mask_t* mask, int64_t column, int64_t end) {
        static thread_local std::vector<const at::BFloat16*> found;
        found.clear();
        for (int64_t s = column; s < end; s += 16) {
            for (unsigned some = seen(mask + s, end - s); some; some &= some - 1) {
                found.push_back(value(s + __builtin_ctz(some)));
            }
        }
        found.resize(blocks_of(found.size()) * BLOCK, value(columns));
        for (size_t i = 0; i < found.size(); i += 2) {
            pair(found[i], found[i + 1], gathered + i * WIDE / 32);
        }
        return gathered;
    }

  private:
    const at::BFloat16 *keys, *values;
    int64_t key_stride, value_stride, columns, from, turned_to;
    int64_t paired_to[2];  // even and odd columns, with the next
    __m512i *turned, *paired[2], *gathered;

    const at::BFloat16* value(int64_t column) const {
        if (column >= columns) return reinterpret_cast<const at::BFloat16*>(ZEROS);
        return values + column * value_stride;
    }

    // The pairs of values one[d] and two[d], in the order of `store_shares`.
    static void pair(const at::BFloat16* one, const at::BFloat16* two, __m512i* pairs) {
        for (int d = 0; d < D; d += 32, pairs += 2) {
            const __m512i a = _mm512_loadu_si512(one + d), b = _mm512_loadu_si512(two + d);
            pairs[0] = _mm512_unpacklo_epi16(a, b);
            pairs[1] = _mm512_unpackhi_epi16(a, b);
        }
    }
};
}  // namespace
#endif
