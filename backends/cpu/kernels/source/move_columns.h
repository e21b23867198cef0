#ifndef DRAFTHEAD_MOVE_COLUMNS
#define DRAFTHEAD_MOVE_COLUMNS
#include "common.h"
#include <cstring>

namespace {
// Numbers from one row, head or column of a layer to the next; those of a column are side by side.
struct LayerSteps { int64_t row, head, column; };

// Copies column `from` to `to` in each head of a row; inlined for its sizes, which are constants.
template <typename number_t>
INLINE inline void move_column(number_t* layer, LayerSteps steps, int64_t heads, int64_t size,
                               int64_t row, int64_t from, int64_t to) {
    for (int64_t h = 0; h < heads; ++h) {
        number_t* columns = layer + row * steps.row + h * steps.head;
        std::memcpy(columns + to * steps.column, columns + from * steps.column,
                    sizeof(*columns) * size);
    }
}

// move(row, from, to) for each of source and destination [rows, moves] that are not the same column
template <typename F>
inline void for_moves(const int64_t* source, const int64_t* destination, int64_t rows,
                      int64_t moves, const F& move) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t m = 0; m < moves; ++m) {
            const int64_t from = source[r * moves + m], to = destination[r * moves + m];
            if (from != to) move(r, from, to);
        }
    }
}
}  // namespace
#endif
