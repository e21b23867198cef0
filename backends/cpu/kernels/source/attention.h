#ifndef DRAFTHEAD_ATTENTION
#define DRAFTHEAD_ATTENTION
#include "attention_rows.h"

// A query's result depends on the columns that it sees and on their order, bit by bit: not on other
// queries, and not on where the columns lie. Values are added one column after the other, where one
// of weight 0 changes nothing; with AMX, 32 of those that are seen at a time. A weight's partial sum
// is chosen by its place among those that are seen. So a node of a tree gets what it gets in plain
// decoding. Where instructions multiply bfloat16
// numbers, weights are rounded to these before, as in torch's kernel; else they stay in float32.
namespace {
// From one row, head and token or key to the next; the values of one are side by side.
struct Steps { int64_t b, h, t; };

// output [batch, heads, tokens, D]; a task is up to MOST_QUERIES queries of a row that share a head
// of keys, in tasks of nearly the same size; heads of a token follow each other, as they share a mask
template <int D, typename mask_t>
void attend(const at::BFloat16* query, Steps q, const at::BFloat16* key, Steps k,
            const at::BFloat16* value, Steps v, const mask_t* mask, Steps m,
            at::BFloat16* output, Steps o, int64_t batch, int64_t heads, int64_t kv_heads,
            int64_t tokens, int64_t columns, float scale, int threads) {
    const int64_t sharing = heads / kv_heads, queries = sharing * tokens;  // of a head of keys
    const int64_t group = group_size(queries, MOST_QUERIES);
    const int64_t blocks = (queries + group - 1) / group;
    const int64_t tasks = batch * kv_heads * blocks;
    // Tasks that are left when all threads have as many are split: of 5 on 2 threads, the fifth.
    const int64_t whole = tasks / threads * threads, parts = (tasks - whole) * threads;
    #pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t item = 0; item < whole + parts; ++item) {
        const int64_t beyond = std::max<int64_t>(item - whole, 0);
        const int64_t task = item - beyond + beyond / threads;
        int64_t start = task % blocks * group;
        int64_t rows = std::min(group, queries - start);
        if (item >= whole) {
            const int64_t share = (rows + threads - 1) / threads, before = beyond % threads * share;
            start += before;
            rows = std::min(share, rows - before);
        }
        const int64_t b = task / (kv_heads * blocks), kv_head = task / blocks % kv_heads;
        Queries<D, mask_t> of;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t h = kv_head * sharing + (start + r) % sharing, t = (start + r) / sharing;
            copy(query + b * q.b + h * q.h + t * q.t, D, of.query + r * D);
            of.mask[r] = mask + b * m.b + h * m.h + t * m.t;
            of.output[r] = output + b * o.b + h * o.h + t * o.t;
        }
        if (rows > 0) {  // else there are fewer than threads
            attend_rows<D>(of, rows, key + b * k.b + kv_head * k.h, k.t,
                           value + b * v.b + kv_head * v.h, v.t, columns, scale);
        }
    }
}
}  // namespace
#endif
