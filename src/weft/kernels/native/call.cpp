#include "call.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>

#include "choose.h"
#include "make_plan.h"
#include "team.h"

namespace weft {

namespace {

constexpr int64_t LINE = 64;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// Hands out parts of one block of memory, each on a cache line of its own.
struct Arena {
    char* next;
    char* take(int64_t bytes) {
        char* found = next;
        next += lines(bytes);
        return found;
    }
};

template <class V> void widen(const void* from, double* to, int64_t count, int64_t pad) {
    for (int64_t i = 0; i < count; i++) to[i] = (double)((const V*)from)[i];
    for (int64_t i = count; i < pad; i++) to[i] = 0;
}

template <class V> void narrow(const double* from, void* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) ((V*)to)[i] = (V)from[i];
}

// The first place in `room`, `lead` bytes before a boundary of 64 and at most APART bytes further on, for coefficients of
// `results`.
//
// A load waits for an earlier store to an address with the same last 12 bits. Coefficients that lay up to 256 bytes before
// the results, modulo the length of rows, would be loaded right after such stores.
char* beside(const void* results, int64_t lead, char* room) {
    uintptr_t place = ((uintptr_t)results & ~(uintptr_t)(LINE - 1)) + APART / 4 - (uintptr_t)lead;
    return room + ((place - (uintptr_t)room) & (APART - 1));
}

// Adapts a plan to the place of its results. A line of the computing dtype has `lanes` elements.
void place(Plan& plan, int64_t itemsize, int64_t lanes, const void* results) {
    int64_t line = lanes * itemsize, past = (int64_t)((uintptr_t)results % (uintptr_t)line);
    bool recurs = (plan.depth == 1 ? plan.lanes : plan.depth) % 16 == 0;  // in all rows or planes
    plan.lead = recurs && past ? (line - past) / itemsize : 0;
    plan.streams = plan.streams && (past == 0 || plan.lead > 0);
}

std::vector<Span> runs_of(const Call& call) {
    std::vector<Span> runs;
    int64_t factor = call.shape.rows / (call.mask_rows ? call.mask_rows : 1);
    for (int64_t i = 0; i < call.mask_rows; i++) {
        if (!call.mask[i]) continue;
        if (!runs.empty() && runs.back().stop == i * factor) runs.back().stop += factor;
        else runs.push_back({i * factor, (i + 1) * factor});
    }
    return runs;
}

}  // namespace

bool run(const Call& call) try {
    constexpr int64_t SIZES[DTYPES] = {4, 8, 2, 2};
    std::vector<Span> runs;
    if (call.mask) runs = runs_of(call);
    OwnPlan plan(call.shape, call.pass, SIZES[call.dtype], call.mask ? &runs : nullptr);
    const Arity& arity = ARITY[call.pass];
    bool is_wide = call.dtype == FLOAT64;
    int64_t threads = std::min(plan.threads, num_threads()), size = is_wide ? 8 : 4;
    int64_t scratch = lines(7 * plan.pitch * 8 + (plan.pitch * 10 * size) + APART);
    int64_t vector = lines(plan.pad * 8), sums = lines(plan.chunks * arity.sums * plan.pad * 8);
    int64_t coefficients = lines(arity.coefficients * plan.coefficient_pitch * size + APART);
    int64_t bytes = (arity.vectors + arity.made) * vector + sums + coefficients + threads * scratch + 3 * threads * LINE;
    std::unique_ptr<char, void (*)(void*)> memory((char*)malloc((size_t)(bytes + LINE)), free);
    if (!memory) return false;

    Arena arena = {(char*)(((uintptr_t)memory.get() + LINE - 1) / LINE * LINE)};
    Job job = {};
    job.plan = &plan, job.epsilon = call.epsilon, job.is_wide = is_wide, job.threads = threads;
    for (int i = 0; i < arity.inputs; i++) job.inputs[i] = call.inputs[i];
    for (int i = 0; i < arity.outputs; i++) job.outputs[i] = call.outputs[i];
    place(plan, SIZES[call.dtype], LINE / size, call.outputs[0]);
    for (int i = 0; i < arity.vectors; i++) {
        double* to = (double*)arena.take(vector);
        (is_wide ? widen<double> : widen<float>)(call.vectors[i], to, plan.channels, plan.pad);
        job.vectors[i] = to;
    }
    for (int i = 0; i < arity.made; i++) job.made[i] = (double*)arena.take(vector);
    job.sums = (double*)arena.take(sums);
    job.coefficients = beside(call.outputs[0], plan.lead * size, arena.take(coefficients));
    job.scratch_bytes = scratch;
    job.scratch = arena.take(threads * scratch);
    job.taken = (Counter*)arena.take(3 * threads * LINE);
    memset(job.taken, 0, (size_t)(3 * threads * LINE));

    const Kernels& found = kernels();
    found.before[call.pass][call.dtype](&job);
    share((void (*)(void*))found.work[call.pass][call.dtype], &job, threads, call.torch_threads);
    for (int i = 0; i < arity.made; i++)
        (is_wide ? narrow<double> : narrow<float>)(job.made[i], call.made[i], plan.channels);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

}  // namespace weft
