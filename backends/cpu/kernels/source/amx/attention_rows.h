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
alignas(64) const at::BFloat16 NO_VALUES[256] = {};

inline int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Which of sixteen columns a mask, added to scores, leaves visible.
template <typename mask_t>
inline __mmask16 seen(const mask_t* mask, int64_t columns, float hidden) {
    const auto some = first(columns);
    return _mm512_mask_cmp_ps_mask(some, load(mask, some), _mm512_set1_ps(hidden), _CMP_NLE_UQ);
}

// What a query sees: no column before `from` or from `end` on. Those of masks up to `hidden` are not
// seen, unless all are such.
struct Sight {
    int64_t from = 0, end;
    float hidden = HIDDEN;

    template <typename mask_t>
    Sight(const mask_t* mask, int64_t columns) : end(columns) {
        while (from < end && !seen(mask + from, end - from, hidden)) from += 16;
        if (from >= end) {
            from = 0;
            hidden = std::numeric_limits<float>::quiet_NaN();
            return;
        }
        from += __builtin_ctz(seen(mask + from, end - from, hidden));
        int64_t last = (columns - 1) / 16 * 16;
        while (!seen(mask + last, columns - last, hidden)) last -= 16;
        end = last + 32 - __builtin_clz(seen(mask + last, columns - last, hidden));
    }
};

// Puts bfloat16(exp(scale * scores + mask - max)) of the columns that are seen into scores' memory,
// one after the other; returns the sum of the weights, not rounded, and counts them.
template <typename mask_t>
inline float weigh(float* scores, const mask_t* mask, int64_t columns, float scale = 1,
                   float hidden = HIDDEN, int64_t* count = nullptr) {
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
        const auto some = seen(mask + s, columns - s, hidden);
        at::vec::Vectorized<float> below(_mm512_sub_ps(_mm512_loadu_ps(scores + s), top));
        const __m512 weight = below.exp_u20();
        sum.add(weight, some);
        store(_mm512_maskz_compress_ps(some, weight), out);
        out += __builtin_popcount(some);
    }
    if (count) *count = out - reinterpret_cast<at::BFloat16*>(scores);
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

inline void configure(int64_t rows) {
    const Shapes shapes(rows, rows);
    written_for_tiles();
    _tile_loadconfig(&shapes);
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
    int64_t turned_to, paired_to[2];  // pairs of even and odd columns with the next

    const at::BFloat16* value(int64_t column) const {
        return column < columns ? values + column * value_stride : NO_VALUES;
    }

    // The keys of blocks of 16 columns.
    const __m512i* turned_keys(int64_t column, int64_t end) {
        for (; turned_to < end; turned_to += 16) {
            const int count = std::min<int64_t>(16, columns - turned_to);
            for (int i = 0; i < count; ++i) {
                for (int d = 0; d < D; d += 32) {  // what is needed next, a cache line at a time
                    _mm_prefetch((const char*)(value(turned_to + i) + d), _MM_HINT_T1);
                }
            }
            turn_keys<D>(keys + turned_to * key_stride, key_stride, count,
                         turned + turned_to * D / 32);
        }
        return turned + column * D / 32;
    }

    // The values of blocks of columns that lie next to each other.
    const __m512i* pairs(int64_t column, int64_t blocks) {
        const int64_t odd = column % 2;
        for (int64_t& c = paired_to[odd]; c + odd < column + blocks * BLOCK; c += 2) {
            pair_values<D>(value(c + odd), value(c + odd + 1), paired[odd] + c / 2 * LINES);
        }
        return paired[odd] + column / 2 * LINES;
    }

    // The values of the columns from `column` on that a query sees.
    template <typename mask_t>
    const __m512i* pairs_seen(const mask_t* mask, const Sight& sight, int64_t column) {
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
        for (int64_t s = column; s < sight.end; s += 16) {
            for (unsigned some = seen(mask + s, sight.end - s, sight.hidden); some; some &= some - 1) {
                add(value(s + __builtin_ctz(some)));
            }
        }
        while (count % BLOCK) add(NO_VALUES);
        return gathered;
    }
};

// sums [rows, D] += weights [rows, 32 blocks] . values
template <int D>
inline void add_blocks(const at::BFloat16* weights, int64_t stride, const __m512i* pairs,
                       int64_t blocks, float* sums) {
    c10::ForcedUnroll<(D + 63) / 64>{}([&](auto chunk) INLINE {
        constexpr int FIRST = chunk * PARTS, COUNT = std::min(PARTS, D / 16 - FIRST);
        float* its = sums + FIRST * TILE;
        _tile_loadd(0, its, D * 4);
        if constexpr (COUNT > 1) _tile_loadd(1, its + TILE, D * 4);
        if constexpr (COUNT > 2) _tile_loadd(2, its + 2 * TILE, D * 4);
        if constexpr (COUNT > 3) _tile_loadd(3, its + 3 * TILE, D * 4);
        for (int64_t b = 0; b < blocks; ++b) {
            multiply_tiles<COUNT>(weights + b * BLOCK, stride, pairs + b * BLOCK / 2 * (D / 16) + FIRST,
                                  64, D * 4);
        }
        store_tiles<COUNT>(its, D * 4);
    });
}

// Attention of up to 16 rows. Their scores lie `width` apart.
template <int D, typename mask_t>
void attend_tile(const Queries<D, mask_t>& of, int64_t start, int64_t rows, const Sight* sights,
                 Head<D>& head, float scale, float* scores, int64_t width) {
    const mask_t* const* mask = of.mask + start;
    int64_t from = sights[0].from, end = 0, most = 0;
    for (int64_t r = 0; r < rows; ++r) {
        from = std::min(from, sights[r].from);
        end = std::max(end, sights[r].end);
        most = std::max(most, sights[r].end - sights[r].from);
    }
    configure(rows);
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
    float totals[TILE];
    int64_t counts[TILE], whole[TILE];  // blocks without gaps
    for (int64_t r = 0; r < rows; ++r) {
        const Sight& sight = sights[r];
        float* its = scores + r * width + sight.from;
        totals[r] = weigh(its, mask[r] + sight.from, sight.end - sight.from, scale, sight.hidden,
                          counts + r);
        for (int64_t s = counts[r]; s < blocks_of(most) * BLOCK; s += BLOCK) {
            _mm512_storeu_si512(reinterpret_cast<at::BFloat16*>(its) + s, _mm512_setzero_si512());
        }
        whole[r] = blocks_of(most);
        if (counts[r] < sight.end - sight.from) {
            int64_t run = sight.from;
            while (seen(mask[r] + run, sight.end - run, sight.hidden) == 0xffff) run += 16;
            whole[r] = (run - sight.from) / BLOCK;
        }
    }
    alignas(64) float sums[TILE * D];
    std::fill_n(sums, rows * D, 0.0f);
    auto add = [&](int64_t r, int64_t next, int64_t block, int64_t blocks, const __m512i* pairs) {
        const auto* its = reinterpret_cast<at::BFloat16*>(scores + r * width + sights[r].from);
        configure(next - r);
        add_blocks<D>(its + block * BLOCK, width * 4, pairs, blocks, sums + r * D);
    };
    for (int64_t r = 0, next; r < rows; r = next) {
        int64_t blocks = 0, common = whole[r];
        for (next = r; next < rows && sights[next].from == sights[r].from; ++next) {
            blocks = std::max(blocks, blocks_of(counts[next]));
            common = std::min(common, whole[next]);
        }
        common = std::min(common, blocks);
        if (common) add(r, next, 0, common, head.pairs(sights[r].from, common));
        for (int64_t i = r, j; i < next; i = j) {  // queries with the same mask
            for (j = i + 1; j < next && mask[j] == mask[i]; ++j) {}
            const int64_t left = blocks_of(counts[i]) - common;
            if (left > 0) add(i, j, common, left, head.pairs_seen(mask[i], sights[i], sights[i].from + common * BLOCK));
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int d = 0; d < D; d += 32) {
            const float* two = sums + r * D + d;
            store_shares(_mm512_load_ps(two), _mm512_load_ps(two + 16), 1.0f / totals[r],
                         of.output[start + r] + d);
        }
    }
}

// Attention of up to MOST_QUERIES rows to one head of keys and values.
template <int D, typename mask_t>
void attend_rows(const Queries<D, mask_t>& of, int64_t rows, const at::BFloat16* keys,
                 int64_t key_stride, const at::BFloat16* values, int64_t value_stride,
                 int64_t columns, float scale) {
    std::vector<Sight> sights;
    int64_t from = columns;
    for (int64_t r = 0; r < rows; ++r) {
        const bool same = r && of.mask[r] == of.mask[r - 1];
        sights.push_back(same ? sights.back() : Sight(of.mask[r], columns));
        from = std::min(from, sights[r].from / 16 * 16);
    }
    // Room for whole blocks; rows of scores are an odd number of lines, which lie apart in a cache.
    const int64_t room = blocks_of(columns) * BLOCK + 2 * BLOCK, lines = room / 16 + 1;
    const int64_t each = room * D / 32;
    static thread_local std::vector<__m512i> memory;
    if (int64_t(memory.size()) < TILE * lines + 4 * each) memory.resize(TILE * lines + 4 * each);
    __m512i* turned = memory.data() + TILE * lines;
    Head<D> head{keys, values, key_stride, value_stride, columns, turned,
                 {turned + each, turned + 2 * each}, turned + 3 * each, from, {from, from}};
    for (int64_t r = 0; r < rows; r += TILE) {
        attend_tile<D>(of, r, std::min<int64_t>(TILE, rows - r), sights.data() + r, head, scale,
                       reinterpret_cast<float*>(memory.data()), lines * 16);
    }
    _tile_release();
}
}  // namespace
#endif
