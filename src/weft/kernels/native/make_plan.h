// Plans and runs calls.
#pragma once
#include <stddef.h>

#include <vector>

#include "call.h"

namespace weft {

struct OwnPlan : Plan {
    // `runs` are the rows that count, null for all of them.
    OwnPlan(const Shape& shape, Pass pass, int64_t itemsize, const std::vector<Span>* runs);

private:
    void cut(const std::vector<Span>& runs, int64_t total, int64_t chunks);
    int64_t rows_of(size_t group) const;
    void cut_rows(int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep);
    void plan_rows(int64_t rows, int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep);
    void plan_planes(int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep);

    std::vector<Span> own_spans;
    std::vector<int64_t> own_groups, own_counts;
};

}  // namespace weft
