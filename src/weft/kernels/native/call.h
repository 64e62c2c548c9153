// A batch norm call on pointers: the border between Python and the kernels.
#pragma once
#include "plan.h"

namespace weft {

struct Shape { int64_t rows, channels, depth; };

struct Call {
    Pass pass;
    Dtype dtype;
    Shape shape;
    double epsilon;
    int64_t torch_threads;   // see `share`
    const void* inputs[3];
    void* outputs[2];
    const void* vectors[5];  // float32, beside float64 data float64
    void* made[2];
    const uint8_t* mask;     // which rows count, null for all
    int64_t mask_rows;       // each stands for shape.rows / mask_rows rows
};

// True unless memory ran out.
bool run(const Call& call);

}  // namespace weft
