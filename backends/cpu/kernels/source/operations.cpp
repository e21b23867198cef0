// The kernels as operations of torch: compiled once for all models, and called as they are.
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Unroll.h>
#include <omp.h>
#include <torch/library.h>

#include "attention.h"
#include "gated_mlp.h"
#include "growth.h"
#include "linear.h"
#include "move_columns.h"
#include "norm.h"
#include "pack_blocks.h"
#include "top_k.h"

namespace {
using at::BFloat16, at::IntArrayRef, at::Tensor, at::TensorList;

// Of fewer numbers than these each thread would wait longer for the others than it works.
constexpr int64_t SHARED = 8192;
constexpr int MOST = 64;  // of the largest

int threads() { return omp_get_max_threads(); }

const BFloat16* read(const Tensor& x) { return x.const_data_ptr<BFloat16>(); }
BFloat16* written(const Tensor& x) { return x.mutable_data_ptr<BFloat16>(); }
// Packed weights of any form, and the size of a block of them.
const BFloat16* packed_of(const Tensor& x) {
    return static_cast<const BFloat16*>(x.const_data_ptr());
}
int64_t block_size(const Tensor& x) { return x.stride(0) * x.element_size() / 2; }
const BFloat16* read_if_any(const Tensor& x) { return x.numel() ? read(x) : nullptr; }
int64_t rows_of(const Tensor& x) { return x.numel() / x.size(-1); }

// The first part of [rows, inner] x packed, whose form its type tells.
void multiply_rows(const BFloat16* x, const Tensor& packed, const BFloat16* bias, BFloat16* out,
                   int64_t rows, int64_t inner, int64_t size) {
    const auto multiply = packed.scalar_type() == at::kByte  ? linear<BlockRows>
                          : packed.scalar_type() == at::kInt ? linear<Int8Rows>
                                                             : linear<Bfloat16Rows>;
    multiply(x, packed_of(packed), block_size(packed), bias, out, rows, inner, size, threads());
}

void gate_rows(const BFloat16* x, const Tensor& packed, BFloat16* out, int64_t rows, int64_t inner,
               int64_t size) {
    const auto multiply = packed.scalar_type() == at::kByte  ? gated<BlockRows>
                          : packed.scalar_type() == at::kInt ? gated<Int8Rows>
                                                             : gated<Bfloat16Rows>;
    multiply(x, packed_of(packed), block_size(packed), out, rows, inner, size, threads());
}

// f(D as a constant) for heads of a multiple of 32 values, up to 256
template <int D = 32, typename F>
void with_head_size(int64_t size, const F& f) {
    if constexpr (D > 256) {
        TORCH_CHECK(false, "heads of ", size, " values are not a multiple of 32 up to 256");
    } else if (size == D) {
        f(std::integral_constant<int, D>{});
    } else {
        with_head_size<D + 32>(size, f);
    }
}

// What is added to scores for a mask [...] that is bool, true where keys are visible; or the mask.
Tensor added(const Tensor& mask) {
    if (mask.scalar_type() != at::kBool) return mask;
    const Tensor seen = mask.contiguous();
    Tensor out = at::empty(seen.sizes(), seen.options().dtype(at::kBFloat16));
    const bool* from = seen.const_data_ptr<bool>();
    const BFloat16 shown(0.0f), hidden = std::numeric_limits<BFloat16>::lowest();
    for (int64_t i = 0; i < seen.numel(); ++i) written(out)[i] = from[i] ? shown : hidden;
    return out;
}

// Mask [B or 1, H or 1, T, S]
Steps steps_of_mask(const Tensor& mask) {
    return {mask.size(0) == 1 ? 0 : mask.stride(0), mask.size(1) == 1 ? 0 : mask.stride(1),
            mask.stride(2)};
}

void attend_all(const BFloat16* query, Steps q, const Tensor& key, const Tensor& value,
                const Tensor& mask, BFloat16* out, int64_t batch, int64_t heads, int64_t tokens,
                int64_t columns, double scale) {
    const int64_t size = key.size(3);
    const Steps k{key.stride(0), key.stride(1), key.stride(2)};
    const Steps v{value.stride(0), value.stride(1), value.stride(2)};
    const Steps o{tokens * heads * size, size, heads * size};
    TORCH_CHECK(key.stride(3) == 1 && value.stride(3) == 1 && mask.stride(3) == 1);
    with_head_size(size, [&](auto D) {
        attend<D()>(query, q, read(key), k, read(value), v, read(mask), steps_of_mask(mask), out, o,
                    batch, heads, key.size(1), tokens, columns, scale, threads());
    });
}

Tensor linear_op(const Tensor& x, const Tensor& packed, int64_t size,
                 const std::optional<Tensor>& bias) {
    const Tensor rows = x.contiguous();
    auto sizes = rows.sizes().vec();
    sizes.back() = size;
    Tensor out = at::empty(sizes, x.options());
    multiply_rows(read(rows), packed, bias ? read(*bias) : nullptr, written(out), rows_of(rows),
                  rows.size(-1), size);
    return out;
}

Tensor gated_op(const Tensor& x, const Tensor& packed, int64_t size) {
    const Tensor rows = x.contiguous();
    auto sizes = rows.sizes().vec();
    sizes.back() = size;
    Tensor out = at::empty(sizes, x.options());
    gate_rows(read(rows), packed, written(out), rows_of(rows), rows.size(-1), size);
    return out;
}

std::tuple<Tensor, Tensor> int8_rows_op(const Tensor& x) {
    const Tensor from = x.contiguous();
    const int64_t rows = from.size(0), inner = from.size(1), size = padded(inner);
    Tensor out = at::empty({rows, size}, x.options().dtype(at::kChar));
    Tensor scales = at::empty({rows}, x.options().dtype(at::kFloat));
    auto* numbers = static_cast<uint8_t*>(out.mutable_data_ptr());
    #pragma omp parallel for num_threads(threads()) if (rows * inner > SHARED)
    for (int64_t r = 0; r < rows; ++r) {
        scales.mutable_data_ptr<float>()[r] = to_int8(read(from) + r * inner, inner, 0, numbers + r * size);
    }
    return {out, scales};
}

// Packs a matrix in blocks of a file [N, row bytes]: [N / 32, bytes].
void write_blocks_op(const Tensor& packed, const Tensor& raw, int64_t kind) {
    const int64_t columns = raw.size(0), row = raw.stride(0), stride = packed.stride(0);
    const auto* from = raw.const_data_ptr<uint8_t>();
    auto* to = packed.mutable_data_ptr<uint8_t>();
    with_form(kind, [&](auto form) {
        using Form = decltype(form);
        const int64_t groups = raw.size(1) / Form::RAW * (Form::IS_SUPER ? SUPER : 1);
        TORCH_CHECK(Form::bytes(groups) <= packed.size(1) && raw.stride(1) == 1);
        #pragma omp parallel for num_threads(threads()) schedule(static)
        for (int64_t c = 0; c < columns; c += 32) {
            pack_columns<Form>(kind, from + c * row, row, std::min<int64_t>(32, columns - c),
                               groups, to + c / 32 * stride);
        }
    });
}

Tensor attend_op(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
                 double scale) {
    auto close = [](const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
    const Tensor q = close(query);
    const int64_t batch = q.size(0), heads = q.size(1), tokens = q.size(2), size = q.size(3);
    Tensor out = at::empty({batch, tokens, heads, size}, q.options());
    attend_all(read(q), {q.stride(0), q.stride(1), q.stride(2)}, close(key), close(value),
               close(added(mask)), written(out), batch, heads, tokens, key.size(2), scale);
    return out.transpose(1, 2);
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps, bool plus_one) {
    const Tensor rows = x.contiguous();
    Tensor out = at::empty_like(rows);
    const int64_t count = rows_of(rows), size = rows.size(-1);
    #pragma omp parallel for num_threads(threads()) if (count * size > SHARED)
    for (int64_t r = 0; r < count; ++r) {
        rms_norm(read(rows) + r * size, read(weight), written(out) + r * size, size, eps, plus_one);
    }
    return out;
}

std::tuple<Tensor, Tensor> rotations_op(const Tensor& positions, const Tensor& frequencies,
                                        double scale) {
    const Tensor places = positions.contiguous();
    auto sizes = places.sizes().vec();
    const int64_t size = 2 * frequencies.numel();
    sizes.push_back(size);
    const auto options = frequencies.options().dtype(at::kBFloat16);
    Tensor cos = at::empty(sizes, options), sin = at::empty(sizes, options);
    const int64_t* place = places.const_data_ptr<int64_t>();
    for (int64_t r = 0; r < places.numel(); ++r) {
        rotations(place[r], frequencies.const_data_ptr<float>(), scale, written(cos) + r * size,
                  written(sin) + r * size, size);
    }
    return {cos, sin};
}

// The tensors of a decoder layer's weights, see `operations.py`.
constexpr int64_t WEIGHTS = 10;
struct LayerWeights {
    const Tensor &norm, &qkv, &qkv_bias, &q_norm, &k_norm, &out, &out_bias, &mlp_norm, &gate_up,
        &down;
    explicit LayerWeights(const Tensor* w)
        : norm(w[0]), qkv(w[1]), qkv_bias(w[2]), q_norm(w[3]), k_norm(w[4]), out(w[5]),
          out_bias(w[6]), mlp_norm(w[7]), gate_up(w[8]), down(w[9]) {}
};

// What the layers of a pass have in common.
struct Pass {
    const Tensor &cos, &sin, &mask, &columns;
    int64_t batch, tokens, width;
    double eps, scale;
};

// Of a decoder layer: x [B, T, D] to out, which may be x, by way of `memory`. Its attention reads
// `given` [B, T, K], or the norm of x.
void run_layer(const Pass& pass, const LayerWeights& w, const BFloat16* x, const Tensor* given,
               const Tensor& keys, const Tensor& values, BFloat16* out, Tensor& memory) {
    const int64_t tokens = pass.tokens, width = pass.width, rows = pass.batch * tokens;
    const int64_t size = keys.size(3), groups = keys.size(1), across = w.qkv.size(0) * 32;
    const int64_t heads = across / size - 2 * groups, mixed = heads * size;
    const int64_t inner = w.gate_up.size(0) * 16, most = std::max(mixed, width);
    const int64_t needed = rows * (width + across + most + inner);
    if (memory.numel() < needed) memory = at::empty({needed}, memory.options());
    BFloat16 *normed = written(memory), *states = normed + rows * width;
    BFloat16 *attended = states + rows * across, *between = attended + rows * most;
    const bool shared = rows * width > SHARED;
    #pragma omp parallel for num_threads(threads()) if (shared)
    for (int64_t r = 0; r < (given ? 0 : rows); ++r) {
        rms_norm(x + r * width, read(w.norm), normed + r * width, width, pass.eps, false);
    }
    multiply_rows(given ? read(*given) : normed, w.qkv, read_if_any(w.qkv_bias), states, rows,
                  given ? given->size(-1) : width, across);
    const int64_t* column = pass.columns.const_data_ptr<int64_t>();
    const int64_t turns = pass.cos.size(0) == 1 ? 0 : tokens;  // rows may share their positions
    #pragma omp parallel for num_threads(threads()) if (shared)
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t b = r / tokens, t = r % tokens, turn = (b * turns + t) * size;
        const BFloat16 *c = read(pass.cos) + turn, *s = read(pass.sin) + turn;
        for (int64_t h = 0; h < heads + groups; ++h) {
            BFloat16* state = states + r * across + h * size;
            const Tensor& its_norm = h < heads ? w.q_norm : w.k_norm;
            if (its_norm.numel()) rms_norm(state, read(its_norm), state, size, pass.eps, false);
            BFloat16* to = state;
            if (h >= heads) {
                to = written(keys) + b * keys.stride(0) + (h - heads) * keys.stride(1) +
                     column[t] * keys.stride(2);
            }
            rotate(state, c, s, to, size);
        }
        for (int64_t g = 0; g < groups; ++g) {
            BFloat16* to = written(values) + b * values.stride(0) + g * values.stride(1) +
                           column[t] * values.stride(2);
            std::memcpy(to, states + r * across + (heads + groups + g) * size, size * 2);
        }
    }
    attend_all(states, {tokens * across, size, across}, keys, values, pass.mask, attended,
               pass.batch, heads, tokens, pass.mask.size(3), pass.scale);
    multiply_rows(attended, w.out, read_if_any(w.out_bias), normed, rows, mixed, width);
    #pragma omp parallel for num_threads(threads()) if (shared)
    for (int64_t r = 0; r < rows; ++r) {
        BFloat16 *sum = attended + r * width, *its = normed + r * width, *to = out + r * width;
        add(x + r * width, its, to, width);
        rms_norm(to, read(w.mlp_norm), sum, width, pass.eps, false);
    }
    gate_rows(attended, w.gate_up, between, rows, width, inner);
    multiply_rows(between, w.down, nullptr, normed, rows, inner, width);
    add(out, normed, out, rows * width);
}

// The outputs [B, T, D] of some of decoder layers that follow each other, see `operations.py`.
std::vector<Tensor> decoder_layers_op(const Tensor& hidden, const Tensor& cos, const Tensor& sin,
                                      const Tensor& mask, TensorList keys, TensorList values,
                                      const Tensor& columns, TensorList weights, double eps,
                                      double scale, IntArrayRef kept,
                                      const std::optional<Tensor>& given) {
    const Tensor first = hidden.contiguous(), seen = added(mask);
    const Tensor read_first = given ? given->contiguous() : first;
    const Pass pass{cos, sin, seen, columns, first.size(0), first.size(1), first.size(2), eps, scale};
    Tensor out = at::empty_like(first), memory = at::empty({0}, first.options());
    const BFloat16* x = read(first);
    std::vector<Tensor> states;
    for (size_t layer = 0; layer < keys.size(); ++layer) {
        if (states.size() && x == read(states.back())) out = at::empty_like(first);
        const LayerWeights its(weights.data() + layer * WEIGHTS);
        run_layer(pass, its, x, given && layer == 0 ? &read_first : nullptr, keys[layer],
                  values[layer], written(out), memory);
        x = read(out);
        if (std::find(kept.begin(), kept.end(), int64_t(layer)) != kept.end()) states.push_back(out);
    }
    return states;
}

// Outputs and logits of an EAGLE-3 head, see `operations.py`.
std::tuple<Tensor, Tensor> eagle3_pass_op(
    TensorList layers, TensorList own, int64_t size, double eps, double scale, double turn,
    bool adds_normed, bool feeds_norm, const Tensor& table, const Tensor& tokens,
    const Tensor& states, bool is_drafted, const Tensor& positions, const Tensor& mask,
    TensorList keys, TensorList values, const Tensor& columns, const std::optional<Tensor>& ends) {
    const Tensor named = tokens.contiguous();
    const Tensor before =
        is_drafted && feeds_norm ? rms_norm_op(states, own[2], eps, false) : states;
    const Tensor normed = rms_norm_op(before, own[1], eps, false);
    const int64_t rows = states.size(0), count = states.size(1), width = states.size(2);
    TORCH_CHECK(table.is_contiguous());
    Tensor given = at::empty({rows, count, 2 * width}, states.options());
    for (int64_t i = 0; i < rows * count; ++i) {
        const int64_t token = named.const_data_ptr<int64_t>()[i];
        TORCH_CHECK(0 <= token && token < table.size(0));
        BFloat16* both = written(given) + 2 * i * width;
        rms_norm(read(table) + token * width, read(own[0]), both, width, eps, false);
        std::copy_n(read(normed) + i * width, width, both + width);
    }
    const auto [cos, sin] = rotations_op(positions, own[3], turn);
    Tensor outputs = decoder_layers_op(adds_normed ? normed : before, cos, sin, mask, keys, values,
                                       columns, layers, eps, scale, {int64_t(keys.size()) - 1},
                                       given)[0];
    if (ends) {
        Tensor last = at::empty({rows, 1, width}, outputs.options());
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t end = r * count + ends->const_data_ptr<int64_t>()[r * ends->stride(0)] - 1;
            std::copy_n(read(outputs) + end * width, width, written(last) + r * width);
        }
        outputs = last;
    }
    return {outputs, linear_op(rms_norm_op(outputs, own[2], eps, false), own[4], size, {})};
}

std::tuple<Tensor, Tensor, Tensor> largest_op(const Tensor& x, int64_t count) {
    const Tensor rows = x.contiguous();
    count = std::min(count, rows.size(-1));
    auto sizes = rows.sizes().vec();
    sizes.back() = count;
    const auto numbers = x.options().dtype(at::kFloat);
    Tensor values = at::empty(sizes, numbers), places = at::empty(sizes, x.options().dtype(at::kLong));
    sizes.back() = 1;
    Tensor totals = at::empty(sizes, numbers);
    TORCH_CHECK(count <= MOST);
    auto find = [&](const auto* from) {
        largest<MOST>(from, rows_of(rows), rows.size(-1), values.mutable_data_ptr<float>(),
                      places.mutable_data_ptr<int64_t>(), totals.mutable_data_ptr<float>(), count,
                      threads());
    };
    if (rows.scalar_type() == at::kFloat) {
        find(rows.const_data_ptr<float>());
    } else {
        find(read(rows));
    }
    return {values, places, totals};
}

Tensor most_probable_op(const Tensor& logits) {
    const Tensor rows = logits.contiguous();
    Tensor out = at::empty(logits.sizes().slice(0, logits.dim() - 1), logits.options().dtype(at::kLong));
    const int64_t size = rows.size(-1);
    #pragma omp parallel for num_threads(threads()) if (rows.numel() > 8 * SHARED)
    for (int64_t r = 0; r < out.numel(); ++r) {
        out.mutable_data_ptr<int64_t>()[r] = most_probable(read(rows) + r * size, size);
    }
    return out;
}

template <typename T>
const T* numbers(const Tensor& x) { return x.const_data_ptr<T>(); }
template <typename T>
T* to(const Tensor& x) { return x.mutable_data_ptr<T>(); }

std::tuple<Tensor, Tensor, Tensor, Tensor> open_level_op(
    const Tensor& scores, const Tensor& tokens, const Tensor& opened, const Tensor& outputs,
    const std::optional<Tensor>& visible, int64_t count, int64_t width) {
    const Tensor all = scores.contiguous(), their = tokens.contiguous(), above = outputs.contiguous();
    const Tensor sees = visible ? visible->contiguous() : at::empty({0}, at::kBool);
    const int64_t rows = all.size(0), size = all.size(1), open = opened.size(1);
    const int64_t before = visible ? sees.size(2) : 0, after = before + count;
    const int64_t bytes = above.size(2) * above.element_size(), earlier = size - open * width;
    TORCH_CHECK(0 <= earlier && count <= open * width);
    Tensor best = at::empty({rows, count}, their.options()), named = at::empty_like(best);
    Tensor inputs = at::empty({rows, count, above.size(2)}, above.options());
    Tensor inside = at::empty({rows, count, after}, sees.options());
    for (int64_t i = 0; i < rows * count; ++i) {
        const int64_t r = i / count, n = i % count;
        static thread_local std::vector<int64_t> order;
        if (n == 0) order = best_of(numbers<float>(all) + r * size + earlier, open * width, count);
        const int64_t number = earlier + order[n], parent = r * open + order[n] / width;
        to<int64_t>(best)[i] = number;
        to<int64_t>(named)[i] = numbers<int64_t>(their)[r * size + number];
        std::memcpy((char*)inputs.mutable_data_ptr() + i * bytes,
                    (const char*)above.const_data_ptr() + parent * bytes, bytes);
        bool* row = to<bool>(inside) + i * after;
        std::copy_n(numbers<bool>(sees) + parent * before, before, row);
        std::fill_n(row + before, count, false);
        row[before + n] = true;
    }
    return {best, named, inputs, inside};
}

std::tuple<Tensor, Tensor, Tensor> with_children_op(
    const Tensor& scores, const Tensor& tokens, const Tensor& parents, const Tensor& opened,
    const Tensor& log_probs, const Tensor& ids) {
    const Tensor logs = log_probs.contiguous(), named = ids.contiguous(), open = opened.contiguous();
    const Tensor was[] = {scores.contiguous(), tokens.contiguous(), parents.contiguous()};
    const int64_t rows = scores.size(0), size = scores.size(1), count = open.size(1);
    const int64_t width = logs.size(2), all = size + count * width;
    Tensor made[] = {at::empty({rows, all}, scores.options()), at::empty({rows, all}, tokens.options()),
                     at::empty({rows, all}, tokens.options())};
    for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(numbers<float>(was[0]) + r * size, size, to<float>(made[0]) + r * all);
        for (int i : {1, 2}) {
            std::copy_n(numbers<int64_t>(was[i]) + r * size, size, to<int64_t>(made[i]) + r * all);
        }
        for (int64_t n = 0; n < count * width; ++n) {
            const int64_t from = r * count * width + n, at = r * all + size + n;
            const int64_t parent = numbers<int64_t>(open)[r * count + n / width];
            to<float>(made[0])[at] = to<float>(made[0])[r * all + parent] +
                                     as_value(numbers<float>(logs)[from]);
            to<int64_t>(made[1])[at] = numbers<int64_t>(named)[from];
            to<int64_t>(made[2])[at] = parent;
        }
    }
    return {made[0], made[1], made[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> best_tree_op(
    const Tensor& scores, const Tensor& tokens, const Tensor& parents, int64_t nodes) {
    const Tensor all = scores.contiguous(), their = tokens.contiguous(), above = parents.contiguous();
    const int64_t rows = all.size(0), size = all.size(1);
    TORCH_CHECK(nodes <= size);
    Tensor named = at::empty({rows, nodes}, their.options()), hung = at::empty_like(named);
    Tensor depths = at::empty_like(named), values = at::empty({rows, nodes}, all.options());
    Tensor ancestors = at::empty({rows, nodes, nodes}, their.options().dtype(at::kBool));
    for (int64_t r = 0; r < rows; ++r) {
        best_tree(numbers<float>(all) + r * size, numbers<int64_t>(their) + r * size,
                  numbers<int64_t>(above) + r * size, size, nodes, to<int64_t>(named) + r * nodes,
                  to<int64_t>(hung) + r * nodes, to<int64_t>(depths) + r * nodes,
                  to<bool>(ancestors) + r * nodes * nodes, to<float>(values) + r * nodes);
    }
    return {named, hung, depths, ancestors, values};
}

Tensor visible_columns_op(const Tensor& visible, const Tensor& lengths, const Tensor& seen,
                          const Tensor& own) {
    const Tensor sees = visible.contiguous(), committed = lengths.contiguous();
    const int64_t rows = committed.size(0), nodes = sees.size(1), among = sees.size(2);
    const int64_t columns = seen.numel(), first = numbers<int64_t>(own)[0] - (among - nodes);
    const int64_t shared = sees.size(0) == 1 ? 0 : nodes, end = std::min(first + among, columns);
    Tensor mask = at::empty({rows, 1, nodes, columns}, sees.options());
    for (int64_t i = 0; i < rows * nodes; ++i) {
        const int64_t r = i / nodes, own = std::min(numbers<int64_t>(committed)[r], columns);
        bool* row = to<bool>(mask) + i * columns;
        std::fill_n(row, columns, false);
        if (first < end) {
            std::copy_n(numbers<bool>(sees) + (r * shared + i % nodes) * among, end - first, row + first);
        }
        std::fill_n(row, own, true);
    }
    return mask;
}

void move_columns_op(TensorList keys, TensorList values, const Tensor& source,
                     const Tensor& destination) {
    const Tensor from = source.contiguous(), to = destination.contiguous();
    for_moves(from.const_data_ptr<int64_t>(), to.const_data_ptr<int64_t>(), from.size(0),
              from.size(1), [&](int64_t row, int64_t f, int64_t t) {
        for (TensorList part : {keys, values}) {
            for (const Tensor& layer : part) {
                move_column(static_cast<char*>(layer.mutable_data_ptr()),
                            {layer.stride(0) * layer.element_size(),
                             layer.stride(1) * layer.element_size(),
                             layer.stride(2) * layer.element_size()},
                            layer.size(1), layer.size(3) * layer.element_size(), row, f, t);
            }
        }
    });
}
}  // namespace

TORCH_LIBRARY_IMPL(drafthead, CPU, m) {
    m.impl("linear", TORCH_FN(linear_op));
    m.impl("gated", TORCH_FN(gated_op));
    m.impl("int8_rows", TORCH_FN(int8_rows_op));
    m.impl("write_blocks", TORCH_FN(write_blocks_op));
    m.impl("attend", TORCH_FN(attend_op));
    m.impl("rms_norm", TORCH_FN(rms_norm_op));
    m.impl("rotations", TORCH_FN(rotations_op));
    m.impl("decoder_layers", TORCH_FN(decoder_layers_op));
    m.impl("eagle3_pass", TORCH_FN(eagle3_pass_op));
    m.impl("largest_logits", TORCH_FN(largest_op));
    m.impl("most_probable", TORCH_FN(most_probable_op));
    m.impl("open_level", TORCH_FN(open_level_op));
    m.impl("with_children", TORCH_FN(with_children_op));
    m.impl("best_tree", TORCH_FN(best_tree_op));
    m.impl("visible_columns", TORCH_FN(visible_columns_op));
    m.impl("move_columns", TORCH_FN(move_columns_op));
}
