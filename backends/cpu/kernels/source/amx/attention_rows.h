// Attention by tiles. Of a query, the weights of the columns that it sees lie next to each other, and
// one product adds up the values of 32 of these: the first 32, the next, ... wherever they lie.
#ifndef DRAFTHEAD_ATTENTION_ROWS
#define DRAFTHEAD_ATTENTION_ROWS
#include "ordered_head.h"

namespace {
// 2^x, within 3e-6 of it: the part of x below 1 by a polynomial.
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
    __m512 tops = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (int64_t s = 0; s < columns; s += 16) {
        const auto some = first(columns - s);
        const __m512 masked = _mm512_fmadd_ps(_mm512_loadu_ps(scores + s), _mm512_set1_ps(scale),
                                              load(mask + s, some));
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

// Sums [16, 64] += x [16, 32] times four tiles of pairs, `step` bytes apart.
inline void add_products(const at::BFloat16* x, int64_t stride, const __m512i* pairs, int64_t step,
                         int64_t pair_stride) {
    const auto* next = reinterpret_cast<const char*>(pairs);
    _tile_loadd(4, x, stride * 2);
    _tile_loadd(6, next, pair_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, next + step, pair_stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, next + 2 * step, pair_stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, next + 3 * step, pair_stride);
    _tile_dpbf16ps(3, 4, 7);
}

inline void load_sums(const float* from, int64_t stride) {
    written_for_tiles();
    _tile_loadd(0, from, stride * 4);
    _tile_loadd(1, from + TILE, stride * 4);
    _tile_loadd(2, from + 2 * TILE, stride * 4);
    _tile_loadd(3, from + 3 * TILE, stride * 4);
}

inline void store_sums(float* to, int64_t stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + TILE, stride * 4);
    _tile_stored(2, to + 2 * TILE, stride * 4);
    _tile_stored(3, to + 3 * TILE, stride * 4);
}

// A tile of up to 16 rows of queries. Memory is for 16 rows more: those that follow are computed as
// well, and nobody reads them.
template <int D, typename mask_t>
struct Rows {
    static constexpr int WIDE = OrderedHead<D>::WIDE;
    const at::BFloat16* query;
    const mask_t* const* mask;
    at::BFloat16* const* output;
    const Sight* sights;
    int64_t count;
    float* scores;  // [32, width], then weights
    int64_t width;
    float *sums, *ends;  // [32, WIDE], and of rows with gaps [16, WIDE]
    float shares[TILE];  // 1 / the sum of weights

    at::BFloat16* weights(int64_t row, int64_t block) {
        float* its = scores + row * width + sights[row].from;
        return reinterpret_cast<at::BFloat16*>(its) + block * BLOCK;
    }

    void weigh_all(OrderedHead<D>& head, float scale) {
        int64_t from = sights[0].from, end = 0, most = 0;
        for (int64_t r = 0; r < count; ++r) {
            from = std::min(from, sights[r].from / 16 * 16);
            end = std::max(end, sights[r].end);
            most = std::max(most, blocks_of(sights[r].count));
        }
        for (int64_t s = from; s < end; s += 64) {
            const __m512i* keys = head.turned_keys(s, s + 64);
            load_sums(ZEROS, 0);
            for (int d = 0; d < D; d += 32) {
                add_products(query + d, D, keys + d / 2, D * 32, 64);
            }
            store_sums(scores + s, width);
        }
        for (int64_t r = 0; r < count; ++r) {
            const Sight& sight = sights[r];
            shares[r] = 1 / weigh(scores + r * width + sight.from, mask[r] + sight.from,
                                  sight.end - sight.from, scale, sight.gaps());
            for (auto* left = weights(r, 0) + sight.count; left < weights(r, most); left += BLOCK) {
                _mm512_storeu_si512(left, _mm512_setzero_si512());
            }
        }
    }

    // to = from + the weights of 16 rows times blocks of values
    void add_blocks(const float* from, int64_t stride, int64_t row, int64_t block, int64_t blocks,
                    const __m512i* pairs, float* to) {
        for (int d = 0; d < WIDE; d += 64) {
            load_sums(from + (stride ? d : 0), stride);
            for (int64_t b = 0; b < blocks; ++b) {
                add_products(weights(row, block + b), 2 * width, pairs + b * WIDE + d / 16, 64,
                             WIDE * 4);
            }
            store_sums(to + d, WIDE);
        }
    }

    // The outputs of rows that begin to see at one column. They share blocks up to the first gap.
    void finish(int64_t row, int64_t next, OrderedHead<D>& head) {
        int64_t blocks = 0, common = std::numeric_limits<int64_t>::max();
        for (int64_t r = row; r < next; ++r) {
            blocks = std::max(blocks, blocks_of(sights[r].count));
            if (sights[r].gaps()) common = std::min(common, sights[r].whole);
        }
        common = std::min(common, blocks);
        float* its = sums + row * WIDE;
        add_blocks(ZEROS, 0, row, 0, 0, nullptr, its);
        const int64_t step = head.once ? ONCE : blocks;
        for (int64_t b = 0; b < common; b += step) {
            const int64_t some = std::min(common - b, step);
            add_blocks(its, WIDE, row, b, some, head.pairs(sights[row].from + b * BLOCK, some), its);
        }
        for (int64_t r = row, end; r < next; r = end) {  // those of one mask
            for (end = r + 1; end < next && mask[end] == mask[r]; ++end) {}
            const int64_t left = blocks_of(sights[r].count) - common;
            const float* found = sums + r * WIDE;
            if (left > 0) {
                const auto* pairs = head.pairs_seen(mask[r], sights[r].from + common * BLOCK,
                                                    sights[r].end);
                add_blocks(found, WIDE, r, common, left, pairs, ends);
                found = ends;
            }
            for (int64_t i = r; i < end; ++i, found += WIDE) {
                for (int d = 0; d < D; d += 32) {
                    store_shares(_mm512_load_ps(found + d), _mm512_load_ps(found + d + 16),
                                 shares[i], output[i] + d);
                }
            }
        }
    }
};

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
    // Rows of scores are an odd number of lines: they lie apart in a cache.
    const int64_t room = blocks_of(columns) * BLOCK + 2 * BLOCK, width = room + 16;
    OrderedHead<D> head(keys, key_stride, values, value_stride, columns, from, once, room);
    static thread_local Memory memory;
    alignas(64) float sums[3 * TILE * OrderedHead<D>::WIDE];
    const Shapes shapes(TILE, TILE);
    written_for_tiles();
    _tile_loadconfig(&shapes);  // once: it takes as long as ten products
    for (int64_t r = 0, next; r < rows; r += TILE) {
        Rows<D, mask_t> tile{of.query + r * D, of.mask + r, of.output + r, sights + r,
                             std::min<int64_t>(TILE, rows - r),
                             reinterpret_cast<float*>(memory.of(2 * TILE * width / 16)), width, sums,
                             sums + 2 * TILE * OrderedHead<D>::WIDE};
        tile.weigh_all(head, scale);
        for (int64_t i = 0; i < tile.count; i = next) {
            for (next = i + 1; next < tile.count && sights[r + next].from == sights[r + i].from;) ++next;
            tile.finish(i, next, head);
        }
    }
    _tile_release();
}
}  // namespace
#endif
