// The row kernels of ragged.h. Compiled once for each instruction set.
//
// Short rows are bound by branches that no processor predicts, one for each row's length. So loops over them take a fixed number
// of values, and choose between what they read and what they need.
#include "ragged.h"

#include <stdlib.h>

#include "simd.h"

namespace weft {
namespace WEFT_ISA {

constexpr int64_t AHEAD = 16;         // rows between a prefetch and the copy
constexpr int64_t NARROW = 64;        // elements up to which a row is padded without a branch on its length
constexpr int GROUP = 8;              // values that are summed or compared at once
constexpr int64_t CACHED = 1 << 18;   // bytes that stay in a core's cache between the steps of a softmax

INLINE int64_t read_once(const int64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

INLINE void prefetch(const char* p, int64_t index, int64_t size) {
    __builtin_prefetch((const void*)((uintptr_t)p + (uintptr_t)index * (uintptr_t)size));
}

// True if the `count` entries from `start` on are among the first `limit`.
INLINE bool is_inside(int64_t start, int64_t count, int64_t limit) {
    return (start >= 0) & (count >= 0) & (count <= limit) & (start <= limit - (count <= limit ? count : 0));
}

template <class I> struct Unsigned { typedef uint64_t type; };
template <> struct Unsigned<int32_t> { typedef uint32_t type; };
template <class I> constexpr int64_t LARGEST = (int64_t)((typename Unsigned<I>::type)-1 >> 1);

// Calls each(row, start, stop) with the bounds of the rows `first` to `last` among the values.
template <class Each> INLINE Outcome each_row(const RowCall& call, int64_t first, int64_t last, Each each) {
    int64_t start = read_once(call.splits + first);
    if (start < 0) return OUTSIDE;
    for (int64_t i = first; i < last; i++) {
        int64_t stop = read_once(call.splits + i + 1);
        if ((stop < start) | (stop > call.count)) return OUTSIDE;
        each(i, start, stop);
        start = stop;
    }
    return DONE;
}

// ---- GROUP values in as many vectors as that takes
template <class W> constexpr int LANES_OF = WEFT_WIDTH / (int)sizeof(W) < GROUP ? WEFT_WIDTH / (int)sizeof(W) : GROUP;
template <class W> constexpr int REGISTERS_OF = GROUP / LANES_OF<W>;
template <class T, int N> struct VectorOf { typedef T type __attribute__((vector_size(N * sizeof(T)), may_alias)); };
template <class T, int N> struct LooseVectorOf { typedef T type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias)); };
template <class W> using Lanes = typename VectorOf<W, LANES_OF<W>>::type;
template <int SIZE> struct SignedOf;
template <> struct SignedOf<1> { typedef int8_t type; };
template <> struct SignedOf<2> { typedef int16_t type; };
template <> struct SignedOf<4> { typedef int32_t type; };
template <> struct SignedOf<8> { typedef int64_t type; };

template <class W, class T> INLINE Lanes<W> load_lanes(const T* p) {
    return __builtin_convertvector(*(const typename LooseVectorOf<T, LANES_OF<W>>::type*)p, Lanes<W>);
}

template <class W> INLINE Lanes<W> all_lanes(W value) {
    Lanes<W> found;
    for (int j = 0; j < LANES_OF<W>; j++) found[j] = value;
    return found;
}

// ---- rows that are moved

static Outcome bounds(const RowCall& call, int64_t first, int64_t last) {
    const int64_t *splits = call.splits, *index = call.targets, rows = call.splits_size - 1;
    int64_t *starts = call.made_starts, *sums = call.made_splits + 1, total = 0;
    for (int64_t i = first; i < last; i++) {
        if (i + AHEAD < last) prefetch((const char*)splits, read_once(index + i + AHEAD), 8);
        int64_t row = read_once(index + i);
        if ((row < 0) | (row >= rows)) return OUTSIDE;
        int64_t start = read_once(splits + row);
        total = (int64_t)((uint64_t)total + (uint64_t)read_once(splits + row + 1) - (uint64_t)start);
        starts[i] = start, sums[i] = total;
    }
    return DONE;
}

static Outcome take(const RowCall& call, int64_t first, int64_t last) {
    int64_t at = read_once(call.splits + first), width = call.width;
    if (at < 0) return OUTSIDE;
    for (int64_t i = first; i < last; i++) {
        if (i + AHEAD < last) {
            int64_t start = read_once(call.starts + i + AHEAD);
            prefetch(call.values, start, width);
            prefetch(call.values, (int64_t)((uint64_t)start + (uint64_t)read_once(call.splits + i + AHEAD + 1) -
                                            (uint64_t)read_once(call.splits + i + AHEAD)), width);
        }
        int64_t start = read_once(call.starts + i), stop = read_once(call.splits + i + 1);
        if ((stop < at) | (stop > call.rows) || !is_inside(start, stop - at, call.count)) return OUTSIDE;
        memcpy(call.out + at * width, call.values + start * width, (size_t)((stop - at) * width));
        at = stop;
    }
    return DONE;
}

// A group of words, of which the first `count` are there, and `word` for the others.
template <class W> INLINE void put_group(W* to, const W* from, int64_t count, W word) {
    typedef typename SignedOf<sizeof(W)>::type I;
    typedef typename LooseVectorOf<W, LANES_OF<W>>::type V;
    const I limit = (I)(count < 0 ? 0 : count < GROUP ? count : GROUP);
    UNROLL for (int r = 0; r < REGISTERS_OF<W>; r++) {
        typename VectorOf<I, LANES_OF<W>>::type places;
        for (int j = 0; j < LANES_OF<W>; j++) places[j] = (I)(r * LANES_OF<W> + j);
        *(V*)(to + r * LANES_OF<W>) = places < limit ? load_lanes<W>(from + r * LANES_OF<W>) : all_lanes(word);
    }
}

// A row has `columns` elements of W, of which those that are missing are the fill.
template <class W> static Outcome pad(const RowCall& call, int64_t first, int64_t last) {
    const W* values = (const W*)call.values;
    W* out = (W*)call.out;
    const W word = *(const W*)call.fill;
    const int64_t columns = call.columns, width = call.width, end = call.count * width, rows = call.splits_size - 1;
    int64_t start = read_once(call.splits + (first < rows ? first : rows));
    if (start < 0) return OUTSIDE;
    for (int64_t i = first; i < last; i++) {
        int64_t from = end, n = 0;
        if (i < rows) {
            int64_t stop = read_once(call.splits + i + 1);
            if ((stop < start) | (stop > call.count)) return OUTSIDE;
            from = start * width, n = (stop - start) * width < columns ? (stop - start) * width : columns;
            start = stop;
        }
        W* __restrict to = out + i * columns;
        const W* __restrict source = values + from;
        if (columns <= NARROW && from + columns <= end) {
            if (columns >= GROUP) {
                for (int64_t k = 0; k < columns - GROUP; k += GROUP) put_group(to + k, source + k, n - k, word);
                put_group(to + columns - GROUP, source + columns - GROUP, n - (columns - GROUP), word);
            } else {
                for (int64_t k = 0; k < columns; k++) {
                    W x = source[k];
                    to[k] = k < n ? x : word;
                }
            }
        } else {
            memcpy(to, source, (size_t)n * sizeof(W));
            for (int64_t k = n; k < columns; k++) to[k] = word;
        }
    }
    return DONE;
}

template <class W> INLINE void fill(W* __restrict out, int64_t start, int64_t stop, const W* __restrict pattern, int64_t width) {
    if (width == 1) {
        W word = *pattern;
        for (int64_t k = start; k < stop; k++) out[k] = word;
    } else {
        for (; start < stop; start += width) memcpy(out + start, pattern, (size_t)width * sizeof(W));
    }
}

// Rows and fill in one pass over the result, whose rows have `width` elements; OUT_OF_ORDER if the targets do not ascend.
template <class W> static Outcome place_in_order(const RowCall& call, int64_t, int64_t) {
    W* out = (W*)call.out;
    const W *values = (const W*)call.values, *pattern = (const W*)call.fill;
    int64_t done = 0, width = call.width;
    for (int64_t i = 0; i < call.blocks; i++) {
        int64_t start = read_once(call.starts + i), at = read_once(call.targets + i), length = read_once(call.lengths + i);
        if (length == 0) continue;
        if (!is_inside(start, length, call.count) || !is_inside(at, length, call.rows)) return OUTSIDE;
        if (at * width < done) return OUT_OF_ORDER;
        if (i + AHEAD < call.blocks) prefetch(call.values, read_once(call.starts + i + AHEAD), width * (int64_t)sizeof(W));
        fill(out, done, at * width, pattern, call.fill_width);
        memcpy(out + at * width, values + start * width, (size_t)(length * width) * sizeof(W));
        done = (at + length) * width;
    }
    fill(out, done, call.rows * width, pattern, call.fill_width);
    return DONE;
}

// Rows in any order, over a result that is filled.
static Outcome place(const RowCall& call, int64_t, int64_t) {
    for (int64_t i = 0; i < call.blocks; i++) {
        int64_t start = read_once(call.starts + i), at = read_once(call.targets + i), length = read_once(call.lengths + i);
        if (length == 0) continue;
        if (!is_inside(start, length, call.count) || !is_inside(at, length, call.rows)) return OUTSIDE;
        memcpy(call.out + at * call.width, call.values + start * call.width, (size_t)(length * call.width));
    }
    return DONE;
}

template <class T> static Outcome add(const RowCall& call, int64_t, int64_t) {
    for (int64_t i = 0; i < call.blocks; i++) {
        if (i + AHEAD < call.blocks) prefetch(call.out, read_once(call.targets + i + AHEAD), call.width * (int64_t)sizeof(T));
        int64_t start = read_once(call.starts + i), at = read_once(call.targets + i), length = read_once(call.lengths + i);
        if (length == 0) continue;
        if (!is_inside(start, length, call.count) || !is_inside(at, length, call.rows)) return OUTSIDE;
        const T* __restrict from = (const T*)call.values + start * call.width;
        T* __restrict to = (T*)call.out + at * call.width;
        const int64_t count = length * call.width;
        for (int64_t k = 0; k < count; k++) to[k] = (T)(to[k] + from[k]);
    }
    return DONE;
}

template <class T> static Outcome range(const RowCall& call, int64_t first, int64_t last) {
    const T *starts = (const T*)call.values, *steps = (const T*)call.fill;
    return each_row(call, first, last, [&](int64_t i, int64_t start, int64_t stop) {
        T value = starts[i], step = steps[i];
        for (int64_t k = start; k < stop; k++, value = (T)(value + step)) ((T*)call.out)[k] = value;
    });
}

// ---- rows that are reduced

template <class T> constexpr bool IS_FLOAT = (T)0.5 != 0;

// Each value is converted to W, and combined with the others in an order that depends on the row's length alone.
template <class T> struct Sum {
    typedef T W;
    static constexpr W FIRST = 0;
    template <class V> INLINE V combined(V a, V b) { return (V)(a + b); }
};
template <> struct Sum<float> {
    typedef double W;
    static constexpr W FIRST = 0;
    template <class V> INLINE V combined(V a, V b) { return a + b; }
};

template <class T> constexpr T LOWEST = (T)-1 < 0 ? (T)((T)1 << (8 * sizeof(T) - 1)) : 0;
template <> constexpr float LOWEST<float> = -__builtin_inff();
template <> constexpr double LOWEST<double> = -__builtin_inf();

// NaN wins.
template <class T> struct Max {
    typedef T W;
    static constexpr W FIRST = LOWEST<T>;
    template <class V> INLINE V combined(V a, V b) {
        if constexpr (IS_FLOAT<T>) return (b > a) | (b != b) ? b : a;
        else return b > a ? b : a;
    }
};

// All lanes combined, half by half, without a branch.
template <class Op, class W = typename Op::W> INLINE W reduced(const Lanes<W>* lanes) {
    typedef typename LooseVectorOf<W, 4>::type Four;
    typedef typename LooseVectorOf<W, 2>::type Two;
    W all[GROUP];
    memcpy(all, lanes, sizeof all);
    *(Four*)all = Op::combined(*(Four*)all, *(Four*)(all + 4));
    Two low = Op::combined(*(Two*)all, *(Two*)(all + 2)), high = {low[1], low[0]};
    return Op::combined(low, high)[0];
}

// Rows of single values.
template <class Op, class T> INLINE Outcome reduce_numbers(const RowCall& call, int64_t first, int64_t last, T* out) {
    typedef typename Op::W W;
    typedef typename SignedOf<sizeof(W)>::type I;
    constexpr int L = LANES_OF<W>, R = REGISTERS_OF<W>;
    const T* x = (const T*)call.values;
    const int64_t count = call.count;
    typename VectorOf<I, L>::type places[R];
    for (int j = 0; j < GROUP; j++) places[j / L][j % L] = (I)j;
    const Lanes<W> none = all_lanes(Op::FIRST);
    return each_row(call, first, last, [&](int64_t i, int64_t start, int64_t stop) __attribute__((always_inline)) {
        Lanes<W> lanes[R];
        UNROLL for (int r = 0; r < R; r++) lanes[r] = none;
        for (int64_t k = start, left = stop - start; left > 0; left -= GROUP, k += GROUP) {
            T some[GROUP] = {};
            const T* p = x + k;
            if (__builtin_expect(k + GROUP > count, false)) {
                for (int j = 0; j < GROUP; j++) some[j] = j < left ? p[j] : 0;
                p = some;
            }
            const I limit = (I)(left < GROUP ? left : GROUP);
            UNROLL for (int r = 0; r < R; r++)
                lanes[r] = Op::combined(lanes[r], places[r] < limit ? load_lanes<W>(p + r * L) : none);
        }
        out[i - first] = (T)reduced<Op>(lanes);
    });
}

// B groups of columns of one row, of which `columns` are there. Others are read if they lie before `end`, and not used.
template <class Op, int B, class T>
INLINE void reduce_columns(const T* p, int64_t rows, int64_t width, int64_t columns, const T* end, T* out) {
    typedef typename Op::W W;
    constexpr int L = LANES_OF<W>, R = B * REGISTERS_OF<W>;
    Lanes<W> lanes[R];
    UNROLL for (int r = 0; r < R; r++) lanes[r] = all_lanes(Op::FIRST);
    for (int64_t k = 0; k < rows; k++, p += width) {
        T some[B * GROUP] = {};
        const T* from = p;
        if (__builtin_expect(end - p < B * GROUP, false)) {
            for (int64_t j = 0; j < columns; j++) some[j] = p[j];
            from = some;
        }
        UNROLL for (int r = 0; r < R; r++) lanes[r] = Op::combined(lanes[r], load_lanes<W>(from + r * L));
    }
    W each[B * GROUP];
    memcpy(each, lanes, sizeof each);
    for (int64_t j = 0; j < columns; j++) out[j] = (T)each[j];
}

// Rows `first` to `last` to `out`.
template <class Op, class T> INLINE Outcome reduce_to(const RowCall& call, int64_t first, int64_t last, T* out) {
    const int64_t width = call.width;
    if (width == 1) return reduce_numbers<Op>(call, first, last, out);
    const T *x = (const T*)call.values, *end = x + call.count * width;
    return each_row(call, first, last, [&](int64_t i, int64_t start, int64_t stop) {
        const T* from = x + start * width;
        T* to = out + (i - first) * width;
        int64_t c = 0, rows = stop - start;
        for (; c + 4 * GROUP <= width; c += 4 * GROUP) reduce_columns<Op, 4>(from + c, rows, width, 4 * GROUP, end, to + c);
        for (; c < width; c += GROUP) {
            int64_t columns = width - c < GROUP ? width - c : GROUP;
            reduce_columns<Op, 1>(from + c, rows, width, columns, end, to + c);
        }
    });
}

template <class T> static Outcome sum(const RowCall& call, int64_t first, int64_t last) {
    return reduce_to<Sum<T>>(call, first, last, (T*)call.out + first * call.width);
}

template <class T> static Outcome max(const RowCall& call, int64_t first, int64_t last) {
    return reduce_to<Max<T>>(call, first, last, (T*)call.out + first * call.width);
}

// ---- softmax

// The parameters of exp(x) = 2^n exp(x - n log 2) for x <= 0, with log 2 in two parts.
template <class F> struct Exp;
template <> struct Exp<float> {
    typedef uint32_t Bits;
    static constexpr int MANTISSA = 23, TERMS = 8;
    static constexpr float LEAST = -110, HIGH = 0.693359375f, LOW = -2.12194440e-4f, ROUND = 12582912.0f;
};
template <> struct Exp<double> {
    typedef uint64_t Bits;
    static constexpr int MANTISSA = 52, TERMS = 14;
    static constexpr double LEAST = -746, HIGH = 6.93145751953125e-1, LOW = 1.42860682030941723212e-6, ROUND = 6755399441055744.0;
};

// exp(x) for x <= 0, or NaN.
template <class F> INLINE Register<F> exp_of(Register<F> x) {
    typedef Exp<F> E;
    typedef typename E::Bits Vector __attribute__((vector_size(WEFT_WIDTH), may_alias));
    x = x < all(E::LEAST) ? all(E::LEAST) : x;
    Register<F> shifted = x * (F)1.44269504088896340736 + E::ROUND, n = shifted - E::ROUND;  // its last bits hold n
    Register<F> r = (x - n * E::HIGH) - n * E::LOW, sum;
    F term = 1, inverse[E::TERMS];
    UNROLL for (int i = 1; i < E::TERMS; i++) inverse[i] = term /= (F)i;
    sum = all(inverse[E::TERMS - 1]);
    UNROLL for (int i = E::TERMS - 2; i > 0; i--) sum = fused(sum, r, all(inverse[i]));
    sum = fused(sum, r, all((F)1));
    // n is down to -1077: the power is taken 2^64 times too large, and stays a normal number.
    constexpr typename E::Bits bias = (1u << (8 * sizeof(F) - E::MANTISSA - 2)) - 1 + 64;
    Vector power = ((Vector)shifted + bias) << E::MANTISSA;
    return sum * (Register<F>)power * (F)0x1p-64;
}

template <class F> INLINE void exp_in_place(F* x, int64_t count) {
    int64_t i = 0;
    for (; i + LANES<F> <= count; i += LANES<F>) store(x + i, exp_of<F>(load(x + i)));
    if (i < count) store_part(x + i, exp_of<F>(load_part(x + i, count - i, Register<F>{})), count - i);
}

// Sets each value of a row to f(index, the row's number in that column).
template <class T, class F> INLINE void each_value(T* out, int64_t start, int64_t end, int64_t width, const T* numbers, F f) {
    if (width == 1) {
        const T number = *numbers;
        for (int64_t k = start; k < end; k++) out[k] = f(k, number);
        return;
    }
    for (int64_t k = start * width; k < end * width; k += width)
        for (int64_t j = 0; j < width; j++) out[k + j] = f(k + j, numbers[j]);
}

// Some rows at a time: their values stay in the cache from step to step.
template <class T> static Outcome softmax(const RowCall& call, int64_t first, int64_t last) {
    const int64_t width = call.width, values = CACHED / (int64_t)sizeof(T) / width, many = values < 1 ? 1 : values;
    const T* x = (const T*)call.values;
    T* out = (T*)call.out;
    T* room = (T*)malloc(2 * (size_t)(many * width) * sizeof(T));
    if (!room) return NO_MEMORY;
    Outcome outcome = DONE;
    while (first < last && outcome == DONE) {
        int64_t begin = read_once(call.splits + first), stop = first + 1;
        while (stop < last && stop - first < many && (uint64_t)read_once(call.splits + stop + 1) - (uint64_t)begin <= (uint64_t)many)
            stop++;
        T *top = room, *total = room + (stop - first) * width;
        RowCall here = call;
        outcome = reduce_to<Max<T>>(call, first, stop, top);
        int64_t low = -1, high = -1;
        if (outcome == DONE)
            outcome = each_row(call, first, stop, [&](int64_t i, int64_t start, int64_t end) {
                low = low < 0 ? start : low, high = end;
                each_value(out, start, end, width, top + (i - first) * width, [=](int64_t k, T t) { return x[k] - t; });
            });
        if (outcome == DONE) {
            exp_in_place(out + low * width, (high - low) * width);
            here.values = call.out;
            outcome = reduce_to<Sum<T>>(here, first, stop, total);
        }
        if (outcome == DONE)
            outcome = each_row(call, first, stop, [&](int64_t i, int64_t start, int64_t end) {
                each_value(out, start, end, width, total + (i - first) * width, [=](int64_t k, T t) { return out[k] / t; });
            });
        first = stop;
    }
    free(room);
    return outcome;
}

// ---- indices

template <class I> static int64_t all_below(const void* index, int64_t size, int64_t count) {
    const I* x = (const I*)index;
    I outside = 0, last = (I)(count <= LARGEST<I> ? count - 1 : LARGEST<I>);
    for (int64_t i = 0; i < size; i++) outside |= (I)((x[i] < 0) | (x[i] > last));
    return !outside;
}

// The longest row, -1 if splits decrease.
template <class I> static int64_t longest(const void* splits, int64_t size, int64_t) {
    typedef typename Unsigned<I>::type U;
    const I* x = (const I*)splits;
    I found = 0, decreases = 0;
    for (int64_t i = 0; i + 1 < size; i++) {
        I length = (I)((U)x[i + 1] - (U)x[i]);
        found = length > found ? length : found;
        decreases |= (I)(x[i + 1] < x[i]);
    }
    return decreases ? -1 : found;
}

extern const RowKernels ROW_KERNELS = {
    {sum<uint8_t>, sum<uint16_t>, sum<uint32_t>, sum<uint64_t>, sum<float>, sum<double>},
    {max<uint8_t>, max<uint16_t>, max<uint32_t>, max<uint64_t>, max<float>, max<double>, max<int8_t>, max<int16_t>,
     max<int32_t>, max<int64_t>},
    {0, 0, 0, 0, softmax<float>, softmax<double>},
    {add<uint8_t>, add<uint16_t>, add<uint32_t>, add<uint64_t>, add<float>, add<double>},
    {0, 0, range<uint32_t>, range<uint64_t>, range<float>, range<double>},
    {pad<uint8_t>, pad<uint16_t>, pad<uint32_t>, pad<uint64_t>},
    place,
    {place_in_order<uint8_t>, place_in_order<uint16_t>, place_in_order<uint32_t>, place_in_order<uint64_t>},
    take,
    bounds,
    {all_below<int32_t>, all_below<int64_t>},
    {longest<int32_t>, longest<int64_t>},
};

}  // namespace WEFT_ISA
}  // namespace weft
