#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "choose.h"
#include "team.h"

namespace weft {
namespace {

std::atomic<int64_t> part_bytes{4 << 20};  // waking a thread takes as long as copying a megabyte

// Parts of a call that its threads take one by one.
struct Parts {
    RowKernel kernel;
    const RowCall* call;
    std::vector<int64_t> cuts;
    std::atomic<size_t> next{0};
    std::atomic<int> outcome{DONE};
};

void work(void* job) {
    Parts& parts = *(Parts*)job;
    for (size_t i; (i = parts.next.fetch_add(1)) + 1 < parts.cuts.size();) {
        Outcome found = parts.kernel(*parts.call, parts.cuts[i], parts.cuts[i + 1]);
        if (found != DONE) parts.outcome.store(found);
    }
}

std::vector<int64_t> even_cuts(int64_t rows, int64_t parts) {
    std::vector<int64_t> cuts;
    for (int64_t i = 0; i <= parts; i++) cuts.push_back(rows / parts * i + rows % parts * i / parts);
    return cuts;
}

// Cuts after about as many values each. Whatever the splits hold, the cuts cover all rows.
std::vector<int64_t> value_cuts(const int64_t* splits, int64_t rows, int64_t parts) {
    std::vector<int64_t> cuts = {0};
    int64_t total = splits[rows];
    for (int64_t i = 1; i < parts; i++) {
        int64_t wanted = total / parts * i;
        cuts.push_back(std::min<int64_t>(rows, std::lower_bound(splits, splits + rows + 1, wanted) - splits));
    }
    cuts.push_back(rows);
    return cuts;
}

Outcome run_parts(Parts& parts, int64_t threads, int64_t torch_threads) {
    share(work, &parts, threads, torch_threads);
    return (Outcome)parts.outcome.load();
}

}  // namespace

void set_part_bytes(int64_t bytes) { part_bytes.store(std::max<int64_t>(1, bytes)); }

int64_t parts_of(int64_t rows, int64_t bytes) { return std::min({num_threads(), bytes / part_bytes.load(), rows}); }

Outcome run_rows(RowKernel kernel, const RowCall& call, int64_t rows, int64_t bytes, const int64_t* splits, int64_t torch_threads) try {
    int64_t count = parts_of(rows, bytes);
    if (count < 2) return kernel(call, 0, rows);
    int64_t finer = std::min(rows, 4 * count);  // so that a thread that comes late gets less
    Parts parts = {kernel, &call, splits ? value_cuts(splits, rows, finer) : even_cuts(rows, finer)};
    return run_parts(parts, count, torch_threads);
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

Outcome run_bounds(const RowCall& call, int64_t bytes) try {
    call.made_splits[0] = 0;
    int64_t count = parts_of(call.blocks, bytes);
    RowKernel kernel = row_kernels().bounds;
    if (count < 2) return kernel(call, 0, call.blocks);
    Parts parts = {kernel, &call, even_cuts(call.blocks, count)};
    Outcome outcome = run_parts(parts, count, 0);
    for (size_t i = 1; i + 1 < parts.cuts.size(); i++) {  // each part counted from 0
        uint64_t before = (uint64_t)call.made_splits[parts.cuts[i]];
        for (int64_t k = parts.cuts[i] + 1; k <= parts.cuts[i + 1]; k++)
            call.made_splits[k] = (int64_t)((uint64_t)call.made_splits[k] + before);
    }
    return outcome;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

void copy(char* to, const char* from, int64_t bytes) {
    RowCall call = {};
    call.values = from, call.out = to;
    int64_t rows = bytes >> 12;
    RowKernel kernel = [](const RowCall& call, int64_t first, int64_t last) {
        memcpy(call.out + (first << 12), call.values + (first << 12), (size_t)((last - first) << 12));
        return DONE;
    };
    if (run_rows(kernel, call, rows, bytes, nullptr, 0) != DONE) rows = 0;
    memcpy(to + (rows << 12), from + (rows << 12), (size_t)(bytes - (rows << 12)));
}

}  // namespace weft
