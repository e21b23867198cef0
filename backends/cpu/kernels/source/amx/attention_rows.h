// Attention by tiles. Of a query, the weights of the columns that it sees lie next to each other, and
// one product adds up the values of 32 of these: the first, the second, ... 32, wherever they lie.
#ifndef DRAFTHEAD_ATTENTION_ROWS
#define DRAFTHEAD_ATTENTION_ROWS
#include "attention_parts.h"
#include "tiles.h"
#include <vector>

namespace {
constexpr int MOST_QUERIES = 128;  // of one head of keys, worked on together
}
#include "queries.h"

namespace {
constexpr int PARTS = 4;  // tiles of sums
constexpr int BLOCK = 32;  // values that a product adds up
constexpr int64_t ONCE = 4;  // blocks that are put into order for few rows, in a cache
alignas(64) const at::BFloat16 NO_VALUES[256] = {};

inline int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Which of sixteen columns a mask, added to scores, leaves visible.
template <typename mask_t>
inline __mmask16 seen(const mask_t* mask, int64_t columns) {
    const auto some = first(columns);
    return _mm512_mask_cmp_ps_mask(some, load(mask, some), _mm512_set1_ps(HIDDEN), _CMP_NLE_UQ);
}

// What a query sees: `count` columns, the first of which is `from` and the last before `end`. Those of
// masks up to `hidden` are not seen, unless all are such. `blocks` are without gaps.
struct Sight {
    int64_t from = 0, end = 0, count = 0, blocks = 0;

    bool gaps() const { return count < end - from; }
};

template <typename mask_t>
inline Sight sight_of(const mask_t* mask, int64_t columns) {
    Sight sight;
    int64_t run = 0;
    for (int64_t s = 0; s < columns; s += 16) {
        const unsigned some = seen(mask + s, columns - s);
        if (!some) continue;
        const int64_t begins = s + __builtin_ctz(some), ends = s + 32 - __builtin_clz(some);
        const int number = __builtin_popcount(some);
        if (!sight.count) sight.from = begins;
        sight.count += number;
        sight.end = ends;
        // whole parts of 16 in a row
        if (sight.count == sight.end - sight.from) run = sight.count;
    }
    if (!sight.count) return {0, columns, columns, blocks_of(columns)};
    sight.blocks = sight.gaps() ? run / BLOCK : blocks_of(sight.count);
    return sight;
}

// 2^x, within 3e-6 of it.
inline __m512 power_of_2(__m512 x) {
    const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(0.0134266897f);
    for (float factor : {0.0522424653f, 0.241280213f, 0.693044841f, 1.0f}) {
        power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(factor));
    }
    return _mm512_scalef_ps(power, x);  // which rounds x down
}

// Puts bfloat16(exp(scale * scores + mask - max)) of the columns that are seen into scores' memory,
// one after the other; returns the sum of the weights, not rounded.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns, float scale = 1,
                   bool gaps = true) {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 tops = nothing;
    for (int64_t s = 0; s < columns; s += 16) {
        const auto some = first(columns - s);
        const __m512 masked = _mm512_mask3_fmadd_ps(
            _mm512_loadu_ps(scores + s), _mm512_set1_ps(scale), load(mask + s, some), some);
        _mm512_storeu_ps(scores + s, masked);
        tops = _mm512_mask_max_ps(tops, some, tops, masked);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(tops));
    auto* out = reinterpret_cast<at::BFloat16*>(scores);
    SumInTurn sum;
    for (int64_t s = 0; s < columns; s += 16) {
        const auto some = gaps ? seen(mask + s, columns - s) : first(columns - s);
        const __m512 below = _mm512_sub_ps(_mm512_loadu_ps(scores + s), top);
        const __m512 weight = power_of_2(_mm512_mul_ps(below, _mm512_set1_ps(1.44269504f)));
        sum.add(weight, some);
        store(_mm512_maskz_compress_ps(some, weight), out);
        out += __builtin_popcount(some);
    }
    return sum.total();
}

// Sums 0 to COUNT - 1 += a tile of x times tiles of pairs, `step` bytes apart.
template <int COUNT>
inline void multiply_tiles(const void* x, int64_t stride, const void* pairs, int64_t step,
                           int64_t pair_stride) {
    const auto* next = static_cast<const char*>(pairs);
    _tile_loadd(4, x, stride);
    _tile_loadd(6, next, pair_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (COUNT > 1) {
        _tile_loadd(7, next + step, pair_stride);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (COUNT > 2) {
        _tile_loadd(6, next + 2 * step, pair_stride);
        _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (COUNT > 3) {
        _tile_loadd(7, next + 3 * step, pair_stride);
        _tile_dpbf16ps(3, 4, 7);
    }
}

template <int COUNT>
inline void store_tiles(float* sums, int64_t stride) {
    _tile_stored(0, sums, stride);
    if constexpr (COUNT > 1) _tile_stored(1, sums + TILE, stride);
    if constexpr (COUNT > 2) _tile_stored(2, sums + 2 * TILE, stride);
    if constexpr (COUNT > 3) _tile_stored(3, sums + 3 * TILE, stride);
}

// The pairs of values one[d] and two[d]: d = 0-3, 8-11, 16-19 and 24-27 of 32, then the others.
template <int D>
inline void pair_values(const at::BFloat16* one, const at::BFloat16* two, __m512i* pairs) {
    for (int d = 0; d < D; d += 32, pairs += 2) {
        const __m512i a = _mm512_loadu_si512(one + d), b = _mm512_loadu_si512(two + d);
        pairs[0] = _mm512_unpacklo_epi16(a, b);
        pairs[1] = _mm512_unpackhi_epi16(a, b);
    }
}

// Keys and values of one head, in the order of tiles as far as they have been asked for.
template <int D>
struct Head {
    static constexpr int LINES = D / 16;  // of a pair of values
    const at::BFloat16 *keys, *values;
    int64_t key_stride, value_stride, columns;
    __m512i *turned, *paired[2], *gathered;
    int64_t from, turned_to, paired_to[2];  // pairs of even and odd columns with the next
    bool once;  // what was asked for before is not needed any more

    const at::BFloat16* value(int64_t column) const {
        return column < columns ? values + column * value_stride : NO_VALUES;
    }

    // The keys of blocks of 16 columns.
    const __m512i* turned_keys(int64_t column, int64_t end) {
        if (once) from = turned_to = column;
        for (; turned_to < end; turned_to += 16) {
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
            pair_values<D>(value(c + odd), value(c + odd + 1), paired[odd] + (c - from) / 2 * LINES);
        }
        return paired[odd] + (column - odd - from) / 2 * LINES;
    }

    // The values of the columns from `column` on that a query sees.
    template <typename mask_t>
    const __m512i* pairs_seen(const mask_t* mask, int64_t column, int64_t end) {
        __m512i* out = gathered;
        const at::BFloat16* one = nullptr;
        int64_t count = 0;
        auto add = [&](const at::BFloat16* next) {
            ++count;
            if (one) {
                pair_values<D>(one, next, out);
                out += LINES;
            }
            one = one ? nullptr : next;
        };
        for (int64_t s = column; s < end; s += 16) {
            for (unsigned some = seen(mask + s, end - s); some; some &= some - 1) {
                add(value(s + __builtin_ctz(some)));
            }
        }
        while (count % BLOCK) add(NO_VALUES);
        return gathered;
    }
};

// sums [16, D] = start [16, D] + weights [16, 32 blocks] . values
template <int D>
inline void add_blocks(const float* start, const at::BFloat16* weights, int64_t stride,
                       const __m512i* pairs, int64_t blocks, float* sums) {
    written_for_tiles();
    c10::ForcedUnroll<(D + 63) / 64>{}([&](auto chunk) INLINE {
        constexpr int FIRST = chunk * PARTS, COUNT = std::min(PARTS, D / 16 - FIRST);
        const float* its = start + FIRST * TILE;
        _tile_loadd(0, its, D * 4);
        if constexpr (COUNT > 1) _tile_loadd(1, its + TILE, D * 4);
        if constexpr (COUNT > 2) _tile_loadd(2, its + 2 * TILE, D * 4);
        if constexpr (COUNT > 3) _tile_loadd(3, its + 3 * TILE, D * 4);
        for (int64_t b = 0; b < blocks; ++b) {
            multiply_tiles<COUNT>(weights + b * BLOCK, stride, pairs + b * BLOCK / 2 * (D / 16) + FIRST,
                                  64, D * 4);
        }
        store_tiles<COUNT>(sums + FIRST * TILE, D * 4);
    });
}

// Attention of up to 16 rows, whose scores lie `width` apart. Tiles have 16 rows, so what follows these
// is computed as well, and nobody reads it.
template <int D, typename mask_t>
void attend_tile(const Queries<D, mask_t>& of, int64_t start, int64_t rows, const Sight* sights,
                 Head<D>& head, float scale, float* scores, int64_t width) {
    const mask_t* const* mask = of.mask + start;
    int64_t from = sights[0].from, end = 0, most = 0;
    for (int64_t r = 0; r < rows; ++r) {
        from = std::min(from, sights[r].from);
        end = std::max(end, sights[r].end);
        most = std::max(most, blocks_of(sights[r].count));
    }
    for (int64_t s = from / 16 * 16; s < end; s += 16 * PARTS) {
        with_rows<PARTS>(std::min<int64_t>(PARTS, (end - s + 15) / 16), [&](auto count) {
            const __m512i* keys = head.turned_keys(s, s + 16 * count);
            written_for_tiles();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int d = 0; d < D; d += 32) {
                multiply_tiles<count()>(of.query + start * D + d, D * 2, keys + d / 2, D * 32, 64);
            }
            store_tiles<count()>(scores + s, width * 4);
        });
    }
    float shares[TILE];
    for (int64_t r = 0; r < rows; ++r) {
        const Sight& sight = sights[r];
        float* its = scores + r * width + sight.from;
        shares[r] = 1 / weigh(its, mask[r] + sight.from, sight.end - sight.from, scale,
                              sight.gaps());
        for (int64_t s = sight.count; s < most * BLOCK; s += BLOCK) {
            _mm512_storeu_si512(reinterpret_cast<at::BFloat16*>(its) + s, _mm512_setzero_si512());
        }
    }
    alignas(64) float sums[2 * TILE * D], ends[TILE * D];
    alignas(64) static const float ZEROS[TILE * D] = {};
    auto weights_of = [&](int64_t r, int64_t block) {
        return reinterpret_cast<at::BFloat16*>(scores + r * width + sights[r].from) + block * BLOCK;
    };
    for (int64_t r = 0, next; r < rows; r = next) {  // to those that begin to see at a column
        int64_t blocks = 0, common = most;
        for (next = r; next < rows && sights[next].from == sights[r].from; ++next) {
            blocks = std::max(blocks, blocks_of(sights[next].count));
            if (sights[next].gaps()) common = std::min(common, sights[next].blocks);
        }
        common = std::min(common, blocks);
        const float* before = ZEROS;
        int64_t block = 0;
        do {
            const int64_t number = head.once ? std::min(common - block, ONCE) : common;
            const __m512i* pairs = head.pairs(sights[r].from + block * BLOCK, number);
            add_blocks<D>(before, weights_of(r, block), width * 4, pairs, number, sums + r * D);
            before = sums + r * D;
            block += number;
        } while (block < common);
        for (int64_t i = r, j; i < next; i = j) {  // to those with the same mask
            for (j = i + 1; j < next && mask[j] == mask[i]; ++j) {}
            const int64_t left = blocks_of(sights[i].count) - common;
            const float* found = sums + i * D;
            if (left > 0) {
                add_blocks<D>(found, weights_of(i, common), width * 4,
                              head.pairs_seen(mask[i], sights[i].from + common * BLOCK, sights[i].end), left,
                              ends);
                found = ends;
            }
            for (int64_t k = i; k < j; ++k, found += D) {
                for (int d = 0; d < D; d += 32) {
                    store_shares(_mm512_load_ps(found + d), _mm512_load_ps(found + d + 16), shares[k],
                                 of.output[start + k] + d);
                }
            }
        }
    }
}

// Attention of up to MOST_QUERIES rows to one head of keys and values.
template <int D, typename mask_t>
void attend_rows(const Queries<D, mask_t>& of, int64_t rows, const at::BFloat16* keys,
                 int64_t key_stride, const at::BFloat16* values, int64_t value_stride,
                 int64_t columns, float scale) {
    Sight sights[MOST_QUERIES];
    int64_t from = columns;
    bool once = rows <= TILE;
    for (int64_t r = 0; r < rows; ++r) {
        const bool same = r && of.mask[r] == of.mask[r - 1];
        sights[r] = same ? sights[r - 1] : sight_of(of.mask[r], columns);
        from = std::min(from, sights[r].from / 16 * 16);
        once = once && sights[r].from == sights[0].from;
    }
    // Room for whole blocks; rows of scores are an odd number of lines, which lie apart in a cache.
    const int64_t room = blocks_of(columns) * BLOCK + 2 * BLOCK, lines = room / 16 + 1;
    const int64_t each = room * D / 32, needed = 2 * TILE * lines + 4 * each;
    static thread_local std::vector<__m512i> memory;
    if (int64_t(memory.size()) < needed) memory.resize(needed);
    __m512i* turned = memory.data() + 2 * TILE * lines;
    Head<D> head{keys, values, key_stride, value_stride, columns, turned,
                 {turned + (once ? 0 : each), turned + 2 * each}, turned + 3 * each,
                 from, from, {from, from}, once};
    const Shapes shapes(TILE, TILE);
    written_for_tiles();
    _tile_loadconfig(&shapes);  // once: it takes as long as ten products
    for (int64_t r = 0; r < rows; r += TILE) {
        attend_tile<D>(of, r, std::min<int64_t>(TILE, rows - r), sights + r, head, scale,
                       reinterpret_cast<float*>(memory.data()), lines * 16);
    }
    _tile_release();
}
}  // namespace
#endif
