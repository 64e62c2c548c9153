// How a batch norm call is cut into tasks, and what its tasks read and write.
//
// The work is cut by shape alone: into units (ranges of channels) times chunks (ranges of rows). So the results do not depend
// on the number of threads.
#pragma once
#include <stdint.h>

namespace weft {

enum Dtype { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, DTYPES };
enum Pass { FORWARD, INFERENCE, GRAD, INFERENCE_GRAD, GRAD_GRAD, INFERENCE_GRAD_GRAD, PASSES };

// Large arrays read and written, vectors read and written, sums per channel, coefficients per channel.
struct Arity { int inputs, outputs, vectors, made, sums, coefficients; };
constexpr Arity ARITY[PASSES] = {
    {1, 1, 2, 2, 2, 3},  // x -> y; scale, offset -> mean, variance
    {1, 1, 4, 0, 0, 3},  // x -> y; scale, offset, mean, variance
    {2, 1, 3, 2, 2, 4},  // g, x -> x_grad; scale, mean, variance -> scale_grad, offset_grad
    {2, 1, 3, 2, 2, 2},  // the same
    {3, 2, 3, 1, 7, 9},  // g, x, u -> g_grad, x_grad; scale, a, b -> scale_grad
    {3, 2, 5, 1, 2, 5},  // the same; scale, mean, variance, a, b -> scale_grad
};

struct Span { int64_t start, stop; };  // a range of rows

// The data is `rows` x `channels` x `depth`. Channels-last data has depth 1.
struct Plan {
    int64_t channels, depth;
    int64_t lanes;                      // elements of a row; rows with few channels are taken several at a time
    int64_t short_chunk, short_lanes;   // the chunk that has the rows left over, -1 for none, and its row's elements
    int64_t tile;                       // channels of a unit, see `channels_of`
    int64_t parts, part;                // parts of a plane, and their length
    int64_t units, chunks;
    bool has_whole_channels;            // a task has all elements of its channels, and makes their results right after their sums
    int64_t count;                      // elements of a channel
    int64_t pitch;                      // length of a scratch vector
    int64_t pad;                        // length of a vector with an element for each channel
    int64_t coefficient_pitch;
    int64_t lead;                       // elements of a row or plane of results before its first cache line, see rows.h
    bool streams;                       // write results past the caches
    int64_t threads;                    // worth using
    const Span* spans;                  // the rows of all chunks
    const int64_t* groups;              // where each chunk's spans begin, and the end
    const int64_t* counts;              // elements of a channel in each chunk

    int64_t tasks() const { return units * chunks; }
    // The channels of a unit. Channels-last units begin at the cache lines of results: where there is a lead, the channels
    // are a multiple of 16, and the lead is less.
    Span channels_of(int64_t unit) const {
        int64_t from = depth == 1 ? lead : 0;
        return {unit == 0 ? 0 : unit * tile + from, unit + 1 == units ? channels : (unit + 1) * tile + from};
    }
};

// Each counter has a cache line to itself.
struct Counter { int64_t value; char rest[56]; };

struct Job {
    const Plan* plan;
    double epsilon;
    bool is_wide;             // vectors are float64, otherwise float32
    const void* inputs[3];
    void* outputs[2];
    const double* vectors[5]; // `plan->pad` long
    double* made[2];          // results as long, rounded to the dtype of vectors
    double* sums;             // of each chunk, each sum `plan->pad` long
    void* coefficients;       // each `plan->coefficient_pitch` long, in the computing dtype
    char* scratch;            // `scratch_bytes` for each thread
    int64_t scratch_bytes;
    int64_t threads;
    Counter summed, combined;
    Counter* taken;           // of each share the tasks taken for sums; then those for results; then whether a thread has it
};

// The kernels of one instruction set: what a call runs first, and what each of its threads runs then.
struct Kernels {
    void (*before[PASSES][DTYPES])(Job*);
    void (*work[PASSES][DTYPES])(Job*);
};

void yield();  // lets another thread have the core

// The share of its last job that the calling thread had. The next job's may be in its caches still.
int64_t& last_share();

constexpr int64_t APART = 1 << 10;  // see `apart` in rows.h

// Bytes of the smallest elements that are written past the caches: whole cache lines are.
#ifdef __x86_64__
constexpr int64_t LEAST_STREAMED = 4;
#else
constexpr int64_t LEAST_STREAMED = INT64_MAX;
#endif

}  // namespace weft
