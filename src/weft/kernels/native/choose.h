// The choice of an instruction set.
#pragma once
#include <vector>

#include "plan.h"
#include "ragged.h"

namespace weft {

// The kernels of the instruction set in use.
const Kernels& kernels();
const RowKernels& row_kernels();

// The instruction set in use, and those that this machine can run; `force` returns false for any other.
const char* instruction_set();
std::vector<const char*> instruction_sets();
bool force_instruction_set(const char* name);

}  // namespace weft
