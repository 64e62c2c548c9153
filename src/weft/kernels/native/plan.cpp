#include "make_plan.h"

#include <algorithm>

namespace weft {
namespace {

constexpr int64_t SMALL = 1 << 18;         // bytes; a smaller call stays on the caller's thread
constexpr int64_t ELEMENTS = 3 << 10;      // of a channel in a chunk of channels-first data, at least
constexpr int64_t CHANNELS = 1 << 8;       // of a unit of channels-first data, at most
constexpr int64_t ROWS = 1 << 6;           // of a chunk of channels-last data that leaves sums, at least
constexpr int64_t MOST_LANES = 1 << 12;    // of a unit of channels-last data; their sums fit the first two caches
constexpr int64_t FEWEST_LANES = 1 << 10;  // of a unit of channels-last data, if there are several
constexpr int64_t PLANE = 1 << 12;         // bytes of a channels-first plane in a task with whole channels, at least
constexpr int64_t TASKS = 1 << 4;          // enough for the threads of a call
constexpr int64_t CHUNK = 1 << 19;         // bytes
constexpr int64_t SINGLE = 1 << 17;        // bytes of a chunk that leaves no sums to combine
constexpr int64_t MOST_CHUNKS = 64;
constexpr int64_t SPREAD = 256 + 16;       // elements: a quarter of 4 KB, and a cache line
// From here on the inputs alone fill the caches. Results written past them leave the inputs there for their second sweep.
constexpr int64_t PAST = 3 << 23;

// Lengths of vectors that are read in steps of 16.
int64_t whole(int64_t count) { return (count + 15) / 16 * 16; }

// A length of at least `count` for vectors that are read side by side. In steps of about 4 KB, they would evict each other from
// the first cache.
int64_t spread(int64_t count) { return count <= SPREAD ? count : count + (SPREAD - count % 1024 + 1024) % 1024; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A power of 2, so that 2, 4 or 8 threads get the same number each.
int64_t chunks_of(int64_t size, int64_t chunk) {
    if (size <= SMALL) return 1;
    int64_t chunks = 1;
    while (chunks <= size / chunk) chunks *= 2;
    return std::min(MOST_CHUNKS, chunks);
}

}  // namespace

// Cuts ranges of rows into chunks of about as many rows each.
void OwnPlan::cut(const std::vector<Span>& runs, int64_t total, int64_t chunks) {
    chunks = std::max<int64_t>(1, std::min(chunks, total));
    int64_t seen = 0;
    own_groups = {0};
    for (Span run : runs)
        while (run.start < run.stop) {
            int64_t edge = total * (int64_t)own_groups.size() / chunks;
            int64_t stop = std::min(run.stop, run.start + edge - seen);
            own_spans.push_back({run.start, stop});
            seen += stop - run.start;
            run.start = stop;
            if (seen == edge) own_groups.push_back((int64_t)own_spans.size());
        }
}

int64_t OwnPlan::rows_of(size_t group) const {
    int64_t rows = 0;
    for (int64_t s = own_groups[group]; s < own_groups[group + 1]; s++) rows += own_spans[s].stop - own_spans[s].start;
    return rows;
}

// Cuts rows into chunks, and long rows into units, too: chunks of few rows would leave as many sums as they have elements.
void OwnPlan::cut_rows(int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep) {
    int64_t enough = std::min(wanted, TASKS);
    int64_t chunks = is_single_sweep ? std::min(wanted, counted) : std::clamp<int64_t>(counted / ROWS, 1, wanted);
    int64_t most = std::max(divide_up(channels, MOST_LANES), enough / chunks);
    int64_t pieces = std::clamp<int64_t>(channels / FEWEST_LANES, 1, most);
    tile = whole(divide_up(channels, pieces));
    cut(runs, counted, std::max(chunks, std::min(enough / pieces, counted / (ROWS / 2))));
}

void OwnPlan::plan_rows(int64_t rows, int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep) {
    // Rows of few channels are taken several at a time, so that they fill whole vectors.
    int64_t together = 1;
    if (channels < 64 && counted == rows) together = 64 / std::min<int64_t>(64, channels & -channels);
    if (rows < 2 * together) together = 1;
    int64_t left = rows % together;
    lanes = tile = channels * together;
    if (together > 1) cut({{0, rows / together}}, rows / together, wanted);
    else cut_rows(counted, runs, wanted, is_single_sweep);
    for (size_t k = 0; k + 1 < own_groups.size(); k++) own_counts.push_back(rows_of(k) * together);
    if (left) {
        own_spans.push_back({rows / together, rows / together + 1});
        own_groups.push_back((int64_t)own_spans.size());
        own_counts.push_back(left);
        short_chunk = (int64_t)own_counts.size() - 1;
        short_lanes = left * channels;
    }
    parts = part = 1;
    units = divide_up(lanes, tile);
    has_whole_channels = own_counts.size() == 1;
    pitch = spread(whole(std::min(lanes, tile)) + 16);  // 16 for the lead
    coefficient_pitch = spread(whole(lanes) + 16);
    streams = streams && lanes % 16 == 0;
}

void OwnPlan::plan_planes(int64_t counted, const std::vector<Span>& runs, int64_t wanted, bool is_single_sweep) {
    tile = std::min(channels, CHANNELS), parts = 1;
    if (has_whole_channels) {
        tile = wanted = 1;
    } else if (wanted > counted) {
        // Some channels of one row lie in one piece; parts of their planes do not.
        tile = std::min(tile, std::max<int64_t>(1, channels * counted / wanted));
        parts = divide_up(wanted, counted * channels);
    }
    if (!is_single_sweep && !has_whole_channels) {
        int64_t chunks = std::max<int64_t>(1, std::min(wanted, counted * depth / ELEMENTS));
        tile = std::min(tile, std::max<int64_t>(1, channels * chunks / wanted));
        wanted = chunks;
    }
    part = divide_up(depth, parts * 64) * 64;
    parts = divide_up(depth, part);
    cut(runs, counted, divide_up(wanted, parts));
    for (size_t k = 0; k + 1 < own_groups.size(); k++)
        for (int64_t p = 0; p < parts; p++) own_counts.push_back(rows_of(k) * (std::min(depth, (p + 1) * part) - p * part));
    units = divide_up(channels, tile);
    lanes = channels;
    pitch = 16 * tile;
    coefficient_pitch = whole(channels);
}

OwnPlan::OwnPlan(const Shape& shape, Pass pass, int64_t itemsize, const std::vector<Span>* runs) : Plan() {
    channels = shape.channels, depth = shape.depth;
    std::vector<Span> every = {{0, shape.rows}};
    int64_t counted = 0;
    for (const Span& run : runs ? *runs : every) counted += run.stop - run.start;
    count = counted * depth;
    if (count * channels == 0) return;
    int64_t element = itemsize * ARITY[pass].inputs;
    bool is_single_sweep = pass == INFERENCE;
    int64_t size = shape.rows * channels * depth * element, chunk = is_single_sweep ? SINGLE : CHUNK;
    int64_t wanted = chunks_of(count * channels * element, chunk);
    short_chunk = -1;
    streams = !runs && size >= PAST && ARITY[pass].outputs == 1 && itemsize >= LEAST_STREAMED;
    if (depth == 1) {
        plan_rows(shape.rows, counted, runs ? *runs : every, wanted, is_single_sweep);
    } else {
        streams = streams && depth % 16 == 0;
        // Of long planes that come from memory, all of a channel is read twice in a row: once from there, once from a cache.
        has_whole_channels = pass == GRAD && streams && channels >= TASKS && depth * element >= PLANE;
        plan_planes(counted, runs ? *runs : every, wanted, is_single_sweep);
    }
    chunks = (int64_t)own_counts.size();
    pad = whole(channels) + 16;  // chunks of 256 channels would lie 4 KB apart
    threads = std::max<int64_t>(1, std::min(tasks(), size / std::min(SMALL, chunk)));
    spans = own_spans.data(), groups = own_groups.data(), counts = own_counts.data();
}

}  // namespace weft
