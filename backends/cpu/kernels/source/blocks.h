// Products with weights in blocks of 4 to 8 bits, which `core/target/blocks.py` explains.
#ifndef DRAFTHEAD_BLOCKS
#define DRAFTHEAD_BLOCKS
#include "ahead.h"
#include "multiply_blocks.h"
#include "numbers.h"
#include <bit>
#include <cstring>
#include <vector>

namespace {
constexpr int GROUP = 32, SUPER = 8;  // values of a group, and groups that share a factor
constexpr int LINE = 64;              // bytes
constexpr int FETCHED_AHEAD = 8192;   // bytes after those that are multiplied, which memory is asked for

// A form of blocks. Packed for 32 columns, a line with its number, and with those of all forms of the
// weights as bits, is followed by its groups: the lower
// four bits of their numbers, then the others. Four values of a column lie next to each other, and of
// every eight the last four in the upper halves of bytes. Scales and minima of the columns precede
// each group. With IS_SUPER they precede every eight groups: the factors of both, then scales and minima
// as whole numbers, of which the minima of four groups of a column lie next to each other.
template <int B, bool M, bool S>
struct Form {
    static constexpr int BITS = B;
    static constexpr bool HAS_MINIMA = M, IS_SUPER = S;
    static constexpr int PARTS = B == 6 ? 2 : 1;  // of a group, each with a scale
    // Numbers without minima have a sign: packed they begin at 0, and sums start below.
    static constexpr int START = M ? -1 : B == 4 ? 0 : B == 5 ? 1 : B == 8 ? 2 : 3;
    static constexpr int64_t NUMBERS = 4 * GROUP * B, SCALES = S ? 0 : LINE * (1 + M);
    static constexpr int64_t FACTORS = S ? LINE * (1 + M) : 0, HEAD = S ? FACTORS + SUPER * LINE : 0;
    // Bytes of a block of a file.
    static constexpr int64_t RAW = !S ? 2 * (1 + M) + 4 * B : 32 * B + (M ? 16 : 18);

    static constexpr int64_t bytes(int64_t groups) {
        return LINE + groups * (SCALES + NUMBERS) + groups / SUPER * HEAD;
    }
};

// f(Form) for the number of a kind, in the order of KINDS
template <typename F>
inline void with_form(int kind, const F& f) {
    switch (kind) {
        case 0: return f(Form<4, false, false>());
        case 1: return f(Form<4, true, false>());
        case 2: return f(Form<5, false, false>());
        case 3: return f(Form<8, false, false>());
        case 4: return f(Form<4, true, true>());
        case 5: return f(Form<5, true, true>());
        default: return f(Form<6, false, true>());
    }
}

constexpr int OTHERS = 0b1111;  // bits of the forms whose groups have factors of their own

// A group of a row: its values are scale * numbers.
struct alignas(LINE) InputGroup {
    int8_t numbers[GROUP];
    float scale, sum;  // of the numbers
    // Where sums start for numbers of 4, 5 and 8 bits, and for either half of those of 6.
    int32_t starts[5];
};

// The sums of eight groups that share a scale, 128 * upper + lower.
struct InputSums {
    int8_t upper[SUPER], lower[SUPER];
};

// The sum of sixteen numbers.
inline int sum_of_half(const int8_t* from) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const __m128i shifted = _mm_xor_si128(numbers, _mm_set1_epi8(int8_t(128)));
    const __m128i sums = _mm_sad_epu8(shifted, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

// The largest of the sizes of some values, or what is no number; of zeros the smallest scale.
inline float largest_in(const at::BFloat16* x, int count) {
    ints most = {};
    for (int i = 0; i < count; i += LANES) most = larger(most, load(x + i));
    return std::max(std::bit_cast<float>(largest_of(most)), 1e-30f);
}

// The whole numbers of a group of values, of which `largest` becomes 127; returns their sum.
inline int round_group(const at::BFloat16* x, float largest, InputGroup& to) {
    const float factor = 127 / largest;
    for (int i = 0; i < GROUP; i += LANES) {
        store_bytes(load(x + i) * factor, 0, reinterpret_cast<uint8_t*>(to.numbers) + i);
    }
    const int halves[] = {sum_of_half(to.numbers), sum_of_half(to.numbers + 16)};
    const int sum = halves[0] + halves[1];
    const int starts[] = {8 * sum, 16 * sum, 128 * sum, 32 * halves[0], 32 * halves[1]};
    to.scale = largest / 127;
    to.sum = sum;
    for (int i = 0; i < 5; ++i) to.starts[i] = -starts[i];
    return sum;
}

// Rows of x [rows, inner], group by group: those of all rows follow each other. Forms with IS_SUPER
// multiply rows whose values share a scale where their weights share factors, others those with a scale
// for each group.
struct BlockRows {
    static constexpr int MOST = 64;  // that are multiplied together
    InputGroup *groups, *of_super;
    InputSums* sums;
    int8_t* for_tiles;  // numbers of two groups of_super of each row, one after the other
    int64_t rows, inner;

    BlockRows(const at::BFloat16* x, const at::BFloat16* packed, int64_t rows, int64_t inner, int threads)
        : rows(rows), inner(inner) {
        static thread_local std::vector<InputGroup> memory;
        static thread_local std::vector<InputSums> memory_of_sums;
        static thread_local std::vector<int8_t> memory_for_tiles;
        const int64_t count = rows * inner / GROUP;
        // Tiles read some beyond.
        groups = first_of(memory, 2 * count + MOST);
        of_super = groups + count;
        sums = first_of(memory_of_sums, count / SUPER + MOST);
        for_tiles = TILES ? first_of(memory_for_tiles, (count + MOST) * GROUP) : nullptr;
        const int forms = reinterpret_cast<const uint8_t*>(packed)[1];
        fill(x, forms & OTHERS, forms & ~OTHERS, threads);
    }

    template <typename T>
    static T* first_of(std::vector<T>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size);
        return memory.data();
    }

    // A group of a row, whose values share scales as those of the form's weights do.
    template <typename Form>
    const InputGroup* of(int64_t group, int64_t row) const {
        return (Form::IS_SUPER ? of_super : groups) + group * rows + row;
    }

    void fill(const at::BFloat16* x, bool by_group, bool by_super, int threads) {
        constexpr int64_t WIDE = SUPER * GROUP;
        #pragma omp parallel for num_threads(threads) schedule(static) if (rows * inner > 8192)
        for (int64_t r = 0; r < rows; ++r) {
            const auto* row = x + r * inner;
            for (int64_t k = 0; by_group && k < inner; k += GROUP) {
                round_group(row + k, largest_in(row + k, GROUP), groups[k / GROUP * rows + r]);
            }
            for (int64_t k = 0; by_super && k < inner; k += WIDE) {
                const float largest = largest_in(row + k, WIDE);
                auto& its = sums[k / WIDE * rows + r];
                for (int i = 0; i < SUPER; ++i) {
                    InputGroup& group = of_super[(k / GROUP + i) * rows + r];
                    const int sum = round_group(row + k + i * GROUP, largest, group);
                    if constexpr (TILES) {
                        const int64_t pair = (k / GROUP + i) / 2 * rows + r;
                        std::memcpy(for_tiles + (2 * pair + i % 2) * GROUP, group.numbers, GROUP);
                    }
                    its.upper[i] = sum >> 7;
                    its.lower[i] = sum & 127;
                }
            }
        }
    }
};

// Of a group of LANES columns the register with their numbers of the four values from 4 i on.
template <int BITS>
inline words number(const uint8_t* from, int i) {
    auto line = [&](int i) INLINE {
        words some;
        std::memcpy(&some, from + i * 4 * GROUP, sizeof(some));
        return some;
    };
    const auto bits = [](int some) INLINE { return words{} + some * 0x0101010101010101u; };
    if constexpr (BITS == 8) return line(i);
    words some = line(i / 2) >> i % 2 * 4 & bits(15);
    constexpr int MORE = BITS - 4;
    if constexpr (MORE > 0) {
        const int place = i * MORE % 8;
        const words upper = line(4 + i * MORE / 8);
        const words shifted = place < 4 ? upper << (4 - place) : upper >> (place - 4);
        some |= shifted & bits(((1 << MORE) - 1) << 4);
    }
    return some;
}

// sums[r][c] + the products of COUNT fours of each of R rows with those of TOGETHER registers of
// columns, which are numbers of so many bits: column(c, i) and row(r). Without DOTS those of eight bits
// are multiplied less 128, so with their signs.
template <int BITS, int COUNT, int R, typename C, typename F>
inline void add_columns(ints (*sums)[TOGETHER], const C& column, const F& row) {
    if constexpr (DOTS || BITS == 8) {
        c10::ForcedUnroll<COUNT>{}([&](auto i) INLINE {
            words columns[TOGETHER];
            c10::ForcedUnroll<TOGETHER>{}([&](auto c) INLINE { columns[c] = column(c, i()); });
            c10::ForcedUnroll<R>{}([&](auto r) INLINE {
                const ints four = fours_of(row(r) + i * 4);
                c10::ForcedUnroll<TOGETHER>{}([&](auto c) INLINE {
                    sums[r][c] = add_dots(sums[r][c], columns[c], four);
                });
            });
        });
    } else {
        // Sums of two products have 16 bits, and so have those of as many of these as are added here.
        constexpr int ADDED = BITS == 5 ? 4 : BITS == 6 ? 2 : 8;
        c10::ForcedUnroll<TOGETHER * COUNT / ADDED>{}([&](auto part) INLINE {
            constexpr int c = part / (COUNT / ADDED), first = part % (COUNT / ADDED) * ADDED;
            words columns[ADDED];
            c10::ForcedUnroll<ADDED>{}([&](auto i) INLINE { columns[i] = column(c, first + i); });
            for (int r = 0; r < R; ++r) {
                ints pairs = {};
                c10::ForcedUnroll<ADDED>{}([&](auto i) INLINE {
                    pairs = add_pairs(pairs, pairs_of(columns[i], fours_of(row(r) + (first + i) * 4)));
                });
                sums[r][c] = add_both(sums[r][c], pairs);
            }
        });
    }
}

// A block of 32 columns of a form, from one group to the next.
template <typename Form>
struct Place {
    const uint8_t *head, *own;  // of eight groups, and of this one
    int64_t group;

    explicit Place(const uint8_t* block) : head(block + LINE), own(head + Form::HEAD), group(0) {}

    void next() {
        own += Form::SCALES + Form::NUMBERS;
        if (++group % SUPER || !Form::IS_SUPER) return;
        head = own;
        own += Form::HEAD;
    }

    // Of LANES columns
    auto scale(int part, int column) const {
        if constexpr (Form::IS_SUPER) {
            const int number = group % SUPER * Form::PARTS + part;
            const uint8_t* whole = head + Form::FACTORS + number * 32 + column;
            return Form::HAS_MINIMA ? from_bytes(whole) : from_signed(whole);
        } else {
            return from_halves(own + 2 * column);
        }
    }
    floats factor(int column) const { return from_halves(head + 2 * column); }  // of eight groups
    words number(int column, int i) const {
        return ::number<Form::BITS>(own + Form::SCALES + column * 4, i);
    }
    floats own_minimum(int column) const { return from_halves(own + LINE + 2 * column); }
    // Of eight groups: the factor of minima, and those of four groups
    floats factor_of_minima(int column) const { return from_halves(head + LINE + 2 * column); }
    words minima(int column, int i) const {
        words some;
        std::memcpy(&some, head + Form::FACTORS + SUPER * 32 + (i * 32 + column) * 4, sizeof(some));
        return some;
    }
};

// What products with a group are added up to: whole numbers where groups share a factor.
template <typename Form>
using Sum = decltype(std::declval<Place<Form>>().scale(0, 0));

// sums[r][c] + the products of R rows with a group of TOGETHER registers of columns from `column` on
template <int R, typename Form>
inline void add_group(Sum<Form> (*sums)[TOGETHER], const InputGroup* x, const Place<Form>& at, int column) {
    constexpr int COUNT = 8 / Form::PARTS;
    c10::ForcedUnroll<Form::PARTS>{}([&](auto part) INLINE {
        ints whole[R][TOGETHER];
        c10::ForcedUnroll<R>{}([&](auto r) INLINE {
            constexpr bool FROM_0 = !Form::HAS_MINIMA && (DOTS || Form::BITS != 8);
            for (auto& sum : whole[r]) sum = whole_of(FROM_0 ? x[r].starts[Form::START + part] : 0);
        });
        add_columns<Form::BITS, COUNT, R>(
            whole, [&](int c, int i) INLINE { return at.number(column + c * LANES, part * COUNT + i); },
            [&](int r) INLINE { return x[r].numbers + part * COUNT * 4; });
        c10::ForcedUnroll<TOGETHER>{}([&](auto c) INLINE {
            const auto scale = at.scale(part, column + c * LANES);
            c10::ForcedUnroll<R>{}([&](auto r) INLINE {
                if constexpr (Form::IS_SUPER) {
                    sums[r][c] = add_times(sums[r][c], whole[r][c], scale);
                } else {
                    floats own = to_floats(whole[r][c]) * scale;
                    if constexpr (Form::HAS_MINIMA) {
                        const floats minimum = -at.own_minimum(column + c * LANES);
                        own = multiply_add(minimum, all_of(x[r].sum), own);
                    }
                    sums[r][c] = multiply_add(own, all_of(x[r].scale), sums[r][c]);
                }
            });
        });
    });
}

// Subtracts minima from the sums of R rows with eight groups.
template <int R, typename Form>
inline void subtract_minima(floats (*sums)[TOGETHER], const InputSums* x, const Place<Form>& at,
                            int column) {
    ints whole[R][TOGETHER] = {};
    const auto minima = [&](int c, int i) INLINE { return at.minima(column + c * LANES, i); };
    add_columns<6, 2, R>(whole, minima, [&](int r) INLINE { return x[r].upper; });
    for (auto& row : whole) {
        for (ints& sum : row) sum = times_128(sum);
    }
    add_columns<6, 2, R>(whole, minima, [&](int r) INLINE { return x[r].lower; });
    for (int c = 0; c < TOGETHER; ++c) {
        const floats factor = -at.factor_of_minima(column + c * LANES);
        for (int r = 0; r < R; ++r) {
            sums[r][c] = multiply_add(to_floats(whole[r][c]), factor, sums[r][c]);
        }
    }
}

// totals[r] + the products of R rows with eight groups that share factors, from the sums of their
// numbers.
template <int R, typename Form>
inline void add_super(floats (*totals)[32 / LANES], const Sum<Form> (*whole)[TOGETHER], const BlockRows& x,
                      int64_t row, const Place<Form>& from, int column) {
    floats sums[R][TOGETHER];
    for (int c = 0; c < TOGETHER; ++c) {
        for (int r = 0; r < R; ++r) {
            sums[r][c] = to_floats(whole[r][c]) * from.factor(column + c * LANES);
        }
    }
    if constexpr (Form::HAS_MINIMA) {
        subtract_minima<R>(sums, x.sums + from.group / SUPER * x.rows + row, from, column);
    }
    for (int r = 0; r < R; ++r) {
        const floats scale = all_of(x.of<Form>(from.group, row + r)->scale);
        for (int c = 0; c < TOGETHER; ++c) {
            floats& total = totals[r][column / LANES + c];
            total = multiply_add(sums[r][c], scale, total);
        }
    }
}

// totals[r] + the products of R rows from `row` on with up to eight groups of 32 columns. What is added
// up stays in registers until their end; the numbers of columns are unpacked for each R rows again, for
// which a processor finds the time beside products. Beside each group of TOGETHER registers memory is
// asked for so many lines: for all of them at once it would keep the products waiting.
template <int R, typename Form>
void add_groups(floats (*totals)[32 / LANES], const BlockRows& x, int64_t row, Place<Form> from,
                int64_t end, const uint8_t* fetched, int lines) {
    for (int column = 0; column < 32; column += TOGETHER * LANES) {
        Sum<Form> sums[R][TOGETHER] = {};
        auto total = [&](int r, int c) INLINE -> floats& { return totals[r][column / LANES + c]; };
        if constexpr (!Form::IS_SUPER) {
            for (int r = 0; r < R; ++r) {
                for (int c = 0; c < TOGETHER; ++c) sums[r][c] = total(r, c);
            }
        }
        Place<Form> at = from;
        for (; at.group < end; ++at.group, at.own += Form::SCALES + Form::NUMBERS) {
            for (int i = 0; i < lines; ++i, fetched += LINE) _mm_prefetch((const char*)fetched, _MM_HINT_T1);
            add_group<R>(sums, x.of<Form>(at.group, row), at, column);
        }
        if constexpr (Form::IS_SUPER) {
            add_super<R>(totals, sums, x, row, from, column);
        } else {
            for (int r = 0; r < R; ++r) {
                for (int c = 0; c < TOGETHER; ++c) total(r, c) = sums[r][c];
            }
        }
    }
}

}  // namespace
#include "super_tiles.h"

namespace {
// out[r][0..31] = x[row + r] . block + bias for `count` rows, of which the first `columns` are stored.
template <typename Form>
void multiply_form(Form, int count, const BlockRows& x, int64_t row, const uint8_t* block,
                   const at::BFloat16* bias, at::BFloat16* out, int64_t size, int columns) {
    constexpr int PARTS = 32 / LANES;
    floats totals[BlockRows::MOST][PARTS];
    for (int c = 0; c < PARTS; ++c) {
        const floats start = bias ? load_some(bias + c * LANES, columns - c * LANES) : floats{};
        for (int r = 0; r < count; ++r) totals[r][c] = start;
    }
    const int64_t groups = x.inner / GROUP;
    constexpr int KEPT = 6;  // rows whose sums fit into registers
    constexpr decltype(&add_groups<1, Form>) ADD[KEPT] = {add_groups<1, Form>, add_groups<2, Form>,
                                                      add_groups<3, Form>, add_groups<4, Form>,
                                                      add_groups<5, Form>, add_groups<6, Form>};
    constexpr int64_t STEPS = SUPER * PARTS / TOGETHER, BYTES = Form::bytes(SUPER) - LINE;
    constexpr int LINES = (BYTES / LINE + STEPS - 1) / STEPS;  // that a step asks for
    const bool by_tiles = Form::IS_SUPER && TILES && count > FEW_FOR_TILES;
    if (by_tiles) add_by_tiles<Form>(totals, count, x, row, block);
    for (Place<Form> at(block); at.group < groups && !by_tiles;) {
        const int64_t end = std::min<int64_t>(at.group + SUPER, groups);
        Place<Form> after = at;
        while (after.group < end) after.next();
        const int parts = (count + KEPT - 1) / KEPT;
        for (int part = 0; part < parts; ++part) {
            const int first = count * part / parts, next = count * (part + 1) / parts;
            const int asked = LINES * part / parts, lines = LINES * (part + 1) / parts - asked;
            const auto* fetched = at.own + FETCHED_AHEAD + asked * STEPS * LINE;
            ADD[next - first - 1](totals + first, x, row + first, at, end, fetched, lines);
        }
        at = after;
    }
    for (int c = 0; c < PARTS; ++c) {
        for (int r = 0; r < count; ++r) {
            store_some(totals[r][c], out + r * size + c * LANES, columns - c * LANES);
        }
    }
}

inline void multiply(int count, const BlockRows& rows, int64_t row, const at::BFloat16* block,
                     const at::BFloat16* bias, at::BFloat16* out, int64_t size, int columns, Ahead) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(block);
    with_form(*bytes, [&](auto form) {
        multiply_form(form, count, rows, row, bytes, bias, out, size, columns);
    });
}
}  // namespace
#endif
