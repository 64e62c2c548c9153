// The row kernels: rows of different lengths in one buffer, moved, filled and reduced.
//
// A kernel reads every split, start, length and target once, checks it against the arrays it has, and uses what it read. So it
// neither reads nor writes outside of them, whatever it is given and whatever other threads change meanwhile.
#pragma once
#include <stdint.h>

namespace weft {

// Sums take signed integers as unsigned ones, and complex numbers as pairs of floats.
enum Element { UINT8, UINT16, UINT32, UINT64, FLOAT, DOUBLE, INT8, INT16, INT32, INT64, ELEMENTS };

enum Outcome { OUTSIDE, DONE, OUT_OF_ORDER, NO_MEMORY };

struct RowCall {
    const char* values;      // `count` entries of `width` elements
    int64_t count, width;
    const int64_t* splits;   // `splits_size` of them
    int64_t splits_size;
    const int64_t *starts, *lengths, *targets;  // `blocks` of each
    int64_t blocks;
    char* out;
    int64_t rows;            // of the result
    int64_t columns;         // elements of a padded row
    const char* fill;        // `fill_width` elements that are repeated where there are no values
    int64_t fill_width;
    int64_t *made_starts, *made_splits;
};

// Computes the rows `first` to `last` of a result.
typedef Outcome (*RowKernel)(const RowCall& call, int64_t first, int64_t last);

// The kernels of one instruction set, by element; null if there is none.
struct RowKernels {
    RowKernel sum[ELEMENTS], max[ELEMENTS], softmax[ELEMENTS], add[ELEMENTS], range[ELEMENTS];
    RowKernel pad[4];        // by the logarithm of the bytes of an element, as all that follows
    RowKernel place;         // width in bytes
    RowKernel place_in_order[4];
    RowKernel take;          // width in bytes
    RowKernel bounds;
    // Of indices or splits, their number, and a limit; by dtype, int32 and int64.
    int64_t (*all_below[2])(const void*, int64_t, int64_t), (*longest[2])(const void*, int64_t, int64_t);
};

// Runs a kernel over `rows` rows, on several threads if it moves enough `bytes`. `splits`, if given, say where the rows of
// about as many values are. See `share` for `torch_threads`.
Outcome run_rows(RowKernel kernel, const RowCall& call, int64_t rows, int64_t bytes, const int64_t* splits, int64_t torch_threads);

// `bounds`, and the sums over all rows.
Outcome run_bounds(const RowCall& call, int64_t bytes);

// Copies `bytes`, on several threads if they are many.
void copy(char* to, const char* from, int64_t bytes);

// How many bytes a thread must get; less than the default for tests.
void set_part_bytes(int64_t bytes);
int64_t parts_of(int64_t rows, int64_t bytes);

}  // namespace weft
