// Batch norm's loops over channels-last data.
//
// The data is seen as rows of `stride` elements, of which the first `width` are there. Sums run in the computing dtype
// over a block of rows, and from block to block in double, lane by lane. Memory is read and written in order, as the
// hardware prefetches it. To load and store the sums of long rows less often, four rows are summed at a time, each from
// another part of the block.
//
// A load across two cache lines takes as long as two. So loops over rows begin at the first line, `lead` elements after the
// row's begin, and go on to the next row's first line. Sums and coefficients of the lanes `width : width + lead` are those
// of the lanes `0 : lead`.
#pragma once
#include "simd.h"

namespace weft {
namespace WEFT_ISA {

constexpr int64_t BLOCK = 124;   // rows: four times an odd number, see `rows_of_part`
constexpr double COARSE = 4096;  // see `sampled_shift`

template <class T, int N> struct Data { const T* p[N]; };  // the arrays that are read

struct Rows {
    const Span *first, *last;
    int64_t stride, width, lead;

    int64_t count() const {
        int64_t n = 0;
        for (const Span* s = first; s < last; s++) n += s->stop - s->start;
        return n;
    }
};

INLINE Rows rows_of(const Plan& plan, int64_t unit, int64_t chunk) {
    bool is_short = chunk == plan.short_chunk;
    const Span *first = plan.spans + plan.groups[chunk], *last = plan.spans + plan.groups[chunk + 1];
    if (plan.units == 1) return {first, last, plan.lanes, is_short ? plan.short_lanes : plan.lanes, is_short ? 0 : plan.lead};
    Span some = plan.channels_of(unit);
    return {first, last, plan.lanes, some.stop - some.start, 0};
}

// Room for the sums of one task.
template <class F> struct Scratch {
    F *shift, *s1, *s2;     // of a block
    double *sums, *others;  // of all blocks
};

// One register of elements, of which `left` are there if PART.
template <bool PART, class T> INLINE Register<In<T>> read(const T* p, int64_t left, Register<In<T>> rest) {
    if constexpr (PART) return load_part(p, left, rest);
    else return load(p);
}
template <bool PART, bool STREAM, class T> INLINE void write(T* p, int64_t left, Register<In<T>> v) {
    if constexpr (PART) store_part(p, v, left);
    else if constexpr (STREAM) stream(p, v);
    else store(p, v);
}

template <bool B> struct Bool { static constexpr bool value = B; };

// Calls each(i, left, PART) for all registers of `width` lanes.
template <class F, class Each> INLINE void each_register(int64_t width, Each each) {
    int64_t whole = width / LANES<F> * LANES<F>;
    for (int64_t i = 0; i < whole; i += LANES<F>) each(i, (int64_t)LANES<F>, Bool<false>());
    if (whole < width) each(whole, width - whole, Bool<true>());
}

// Calls each(at, rows, width, lane) for the parts of some rows of `width` lanes from `at` on: the elements before the first
// line, rows that begin at a line, and the rest of the last row.
template <class Each> INLINE void each_part(int64_t at, int64_t rows, int64_t width, int64_t lead, Each each) {
    if (!lead) return each(at, rows, width, 0);
    const int64_t parts[3][4] = {
        {at, 1, lead, width},
        {at + lead, rows - 1, width, lead},
        {at + lead + (rows - 1) * width, 1, width - lead, lead},
    };
    for (auto& part : parts) each(part[0], part[1], part[2], part[3]);
}

template <class F> INLINE void clear(F* v, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES<F>) store(v + i, Register<F>{});
}

// The first place in `room` that suits sums of `data`, `lead` before a boundary of 64 bytes, at most APART bytes further on.
//
// A load waits for an earlier store to an address with the same last 12 bits. If the sums lay a little further on than
// the rows do, modulo the length of rows, most loads would wait.
template <class F, class T, int N> INLINE F* apart(Data<T, N> data, int64_t lead, F* room) {
    int64_t here = (int64_t)room, last = (int64_t)data.p[N - 1], place = (int64_t)data.p[0] - 128;
    if (((place - last) & (APART - 1)) < 384) place = last - 128;
    return (F*)(here + (((place & ~63) - lead * (int64_t)sizeof(F) - here) & (APART - 1)));
}

// ---- sums

// x - k, whose square is added to b.
template <bool PART, class T>
INLINE Register<In<T>> terms(Data<T, 1> data, int64_t at, int64_t left, Register<In<T>> k, Register<In<T>>& b) {
    Register<In<T>> d = read<PART>(data.p[0] + at, left, k) - k;
    b = fused(d, d, b);
    return d;
}

// g, and g (x - k) is added to b.
template <bool PART, class T>
INLINE Register<In<T>> terms(Data<T, 2> data, int64_t at, int64_t left, Register<In<T>> k, Register<In<T>>& b) {
    Register<In<T>> g = read<PART>(data.p[0] + at, left, Register<In<T>>{});
    b = fused(g, read<PART>(data.p[1] + at, left, k) - k, b);
    return g;
}

// How many rows each of some parts of a block has; a few are left over. An odd number: parts that lie a multiple of 4 KB
// apart would evict each other from the first cache.
INLINE int64_t rows_of_part(int64_t rows, int64_t parts) {
    int64_t count = rows / parts;
    return count > 16 && count % 2 == 0 ? count - 1 : count;
}

// The sums of rows of 64 lanes stay in registers.
template <class T, int N> static void sum_64(Data<T, N> data, int64_t at, int64_t rows, const In<T>* shift, In<T>* s1, In<T>* s2) {
    typedef In<T> F;
    constexpr int COUNT = 64 / LANES<F>;
    Register<F> k[COUNT], a[COUNT], b[COUNT];
    UNROLL for (int i = 0; i < COUNT; i++) k[i] = load(shift + i * LANES<F>), a[i] = b[i] = Register<F>{};
    for (int64_t row = at; row < at + 64 * rows; row += 64)
        UNROLL for (int i = 0; i < COUNT; i++) a[i] += terms<false>(data, row + i * LANES<F>, 0, k[i], b[i]);
    UNROLL for (int i = 0; i < COUNT; i++) store(s1 + i * LANES<F>, a[i]), store(s2 + i * LANES<F>, b[i]);
}

// Adds up `count` rows of `width` lanes, and those one, two and three times `step` further on.
template <class T, int N>
static void sum_rows(Data<T, N> data, int64_t at, int64_t count, int64_t step, int64_t stride, int64_t width, Scratch<In<T>> to) {
    typedef In<T> F;
    F *s1 = to.s1, *s2 = to.s2;
    const F* shift = to.shift;
    for (int64_t r = 0; r < count; r++) {
        int64_t here = at + r * stride;
        each_register<F>(width, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
            constexpr bool PART = decltype(part)::value;
            Register<F> k = load(shift + i), b = {};
            Register<F> a0 = terms<PART>(data, here + i, left, k, b);
            Register<F> a1 = terms<PART>(data, here + i + step, left, k, b);
            Register<F> a2 = terms<PART>(data, here + i + 2 * step, left, k, b);
            Register<F> a3 = terms<PART>(data, here + i + 3 * step, left, k, b);
            store(s1 + i, load(s1 + i) + ((a0 + a1) + (a2 + a3)));
            store(s2 + i, load(s2 + i) + b);
        });
    }
}

template <class T, int N>
static void sum_block(Data<T, N> data, int64_t at, int64_t rows, int64_t stride, int64_t width, int64_t lead, Scratch<In<T>> to) {
    typedef In<T> F;
    F *s1 = to.s1, *s2 = to.s2;
    const F* shift = to.shift;
    if (stride == 64 && width == 64) return sum_64(data, at, rows, shift, s1, s2);
    clear(s1, width + lead);
    clear(s2, width + lead);
    int64_t count = rows_of_part(rows, 4), step = count * stride;
    if (count)
        each_part(at, count, width, lead, [&](int64_t here, int64_t some, int64_t lanes, int64_t lane) {
            sum_rows(data, here, some, step, stride, lanes, {to.shift + lane, s1 + lane, s2 + lane, 0, 0});
        });
    for (int64_t i = 0; i < lead; i++) s1[i] = s1[width + i], s2[i] = s2[width + i];
    for (int64_t r = 4 * count; r < rows; r++) {
        int64_t here = at + r * stride;
        each_register<F>(width, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
            Register<F> b = load(s2 + i), a = terms<decltype(part)::value>(data, here + i, left, load(shift + i), b);
            store(s1 + i, load(s1 + i) + a);
            store(s2 + i, b);
        });
    }
}

// The sums of both terms, of `rows.width` lanes from `offset` on.
template <class T, int N> static void add_up(Data<T, N> data, int64_t offset, Rows rows, Scratch<In<T>> to) {
    clear(to.sums, rows.width);
    clear(to.others, rows.width);
    for (const Span* s = rows.first; s < rows.last; s++)
        for (int64_t row = s->start; row < s->stop; row += BLOCK) {
            int64_t count = s->stop - row < BLOCK ? s->stop - row : BLOCK;
            sum_block(data, offset + row * rows.stride, count, rows.stride, rows.width, rows.lead, to);
            for (int64_t i = 0; i < rows.width; i += LANES<double>) {
                store(to.sums + i, load(to.sums + i) + load_wide(to.s1 + i));
                store(to.others + i, load(to.others + i) + load_wide(to.s2 + i));
            }
        }
}

// About the mean of some rows, from the distances of 16 of them to the first: exact if a channel is constant.
//
// It is rounded to some thousandth of the standard deviation. Finer digits would be lost in most differences from it,
// always in the same direction.
template <class T>
static void sampled_shift(const T* x, int64_t at, int64_t count, Rows rows, Scratch<In<T>> to) {
    typedef In<T> F;
    int64_t step = count / 16 > 1 ? count / 16 : 1, samples = (count + step - 1) / step;
    each_register<F>(rows.width, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
        store(to.shift + i, read<decltype(part)::value>(x + at + i, left, Register<F>{}));
    });
    Data<T, 1> data = {{x}};
    sum_block(data, at, samples, step * rows.stride, rows.width, 0, to);
    F portion = (F)(1.0 / samples);
    for (int64_t i = 0; i < rows.width; i++) {
        F k = to.shift[i], spread = (F)COARSE * root(to.s2[i] * portion);
        F found = (k + to.s1[i] * portion + spread) - spread;
        to.shift[i] = is_finite(found) ? found : k;
    }
    for (int64_t i = 0; i < rows.lead; i++) to.shift[rows.width + i] = to.shift[i];
}

// Each lane's sum in `sums`, and its sum of squared distances from its mean in `others`.
template <class T> static void moments(Data<T, 1> data, Rows rows, Scratch<In<T>> to) {
    typedef In<T> F;
    double n = (double)rows.count(), portion = 1 / n;
    sampled_shift(data.p[0], rows.first->start * rows.stride, rows.first->stop - rows.first->start, rows, to);
    add_up(data, 0, rows, to);
    for (int64_t i = 0; i < rows.width; i += 16) {
        int64_t left = rows.width - i < 16 ? rows.width - i : 16;
        double *sums = to.sums + i, *squares = to.others + i, far[16];
        F* shift = to.shift + i;
        for (int j = 0; j < 16; j++) {
            double between = sums[j] * sums[j] * portion;
            far[j] = j < left ? between - 4 * (squares[j] - between) : 0;
        }
        bool is_far = false;
        for (int j = 0; j < 16; j++) is_far |= !(far[j] <= 0);
        if (is_far) {  // a shift is more than two standard deviations away from the mean: sum again, from the mean
            for (int j = 0; j < left; j++) {
                F mean = (F)(shift[j] + sums[j] * portion);
                if (!(far[j] <= 0)) shift[j] = is_finite(mean) ? mean : 0;
            }
            Rows some = rows;
            some.width = left, some.lead = 0;
            double again[2][16];
            add_up(data, i, some, {shift, to.s1, to.s2, again[0], again[1]});
            for (int j = 0; j < left; j++)
                if (!(far[j] <= 0)) sums[j] = again[0][j], squares[j] = again[1][j];
        }
        for (int j = 0; j < left; j++) {
            double a = sums[j], square = squares[j] - a * a * portion;
            sums[j] = n * shift[j] + a;
            squares[j] = square < 0 ? 0 : square;
        }
    }
}

// ---- means and covariances of x, g and u

enum { X, G, U, XX, GX, UX, UG, MOMENTS };

// Adds the sums of a block of `rows` to those of the `n` rows before it, and moves the shifts to the means of both. Reads and
// writes whole registers.
//
// The shifts are the means of all rows before, so what is lost in xx - x^2 / rows is small against the sum so far.
template <class F>
static void merge_covariances(double n, double rows, int64_t width, int64_t pitch, F* shift, const F* sums, double* totals) {
    typedef Register<double> D;
    double portion = 1 / rows, before = n > 0 ? 1 / n : 0, weight = n * rows / (n + rows), now = 1 / (n + rows);
    for (int64_t i = 0; i < width; i += LANES<double>) {
        D s[MOMENTS], k[3], d[3], t[3];
        UNROLL for (int j = 0; j < MOMENTS; j++) s[j] = load_wide(sums + j * pitch + i);
        UNROLL for (int j = X; j <= U; j++) {
            k[j] = load_wide(shift + j * pitch + i), t[j] = load(totals + j * pitch + i);
            d[j] = s[j] * portion + (n * k[j] - t[j]) * before;
        }
        auto add = [&](int j, D more) __attribute__((always_inline)) {
            store(totals + j * pitch + i, load(totals + j * pitch + i) + more);
        };
        D xx = s[XX] - s[X] * s[X] * portion;
        add(XX, (xx < 0.0 ? D{} : xx) + d[X] * d[X] * weight);
        add(GX, s[GX] - s[G] * s[X] * portion + d[G] * d[X] * weight);
        add(UX, s[UX] - s[U] * s[X] * portion + d[U] * d[X] * weight);
        add(UG, s[UG] - s[U] * s[G] * portion + d[U] * d[G] * weight);
        UNROLL for (int j = X; j <= U; j++) {
            D sum = t[j] + (rows * k[j] + s[j]), mean = rounded<F>(sum * now);
            store(totals + j * pitch + i, sum);
            store_narrow(shift + j * pitch + i, mean - mean == 0.0 ? mean : k[j]);
        }
    }
}

// The sums of COUNT registers of a block of rows, measured from the shifts.
template <int COUNT, bool PART, class T>
INLINE void sum_columns(Data<T, 3> data, int64_t at, int64_t left, int64_t rows, int64_t stride, int64_t pitch, const In<T>* shift, In<T>* sums) {
    typedef In<T> F;
    Register<F> k[3][COUNT], s[MOMENTS][COUNT] = {};
    UNROLL for (int c = 0; c < COUNT; c++)
        UNROLL for (int j = X; j <= U; j++) k[j][c] = load(shift + j * pitch + c * LANES<F>);
    for (int64_t r = 0; r < rows; r++, at += stride)
        UNROLL for (int c = 0; c < COUNT; c++) {
            int64_t here = at + c * LANES<F>;
            Register<F> dg = read<PART>(data.p[0] + here, left, k[G][c]) - k[G][c];
            Register<F> dx = read<PART>(data.p[1] + here, left, k[X][c]) - k[X][c];
            Register<F> du = read<PART>(data.p[2] + here, left, k[U][c]) - k[U][c];
            s[X][c] += dx, s[G][c] += dg, s[U][c] += du;
            s[XX][c] = fused(dx, dx, s[XX][c]), s[GX][c] = fused(dg, dx, s[GX][c]);
            s[UX][c] = fused(du, dx, s[UX][c]), s[UG][c] = fused(du, dg, s[UG][c]);
        }
    UNROLL for (int c = 0; c < COUNT; c++)
        UNROLL for (int j = 0; j < MOMENTS; j++) store(sums + j * pitch + c * LANES<F>, s[j][c]);
}

// Each lane's MOMENTS, `pitch` apart, in `totals`: sums of x, g and u, sums of centred products. `shift` has room for 3
// vectors, `sums` for 7.
template <class T>
static void covariances(Data<T, 3> data, Rows rows, int64_t pitch, In<T>* shift, In<T>* sums, double* totals) {
    typedef In<T> F;
    constexpr int64_t COUNT = WEFT_WIDTH == 64 ? 2 : 1, STEP = COUNT * LANES<F>;  // all sums stay in registers
    double n = 0;
    clear(totals, MOMENTS * pitch);
    for (const Span* s = rows.first; s < rows.last; s++)
        for (int64_t row = s->start; row < s->stop; row += BLOCK) {
            int64_t count = s->stop - row < BLOCK ? s->stop - row : BLOCK, at = row * rows.stride, i = 0;
            if (n == 0) {
                sampled_shift(data.p[1], at, count, rows, {shift + X * pitch, sums, sums + pitch, 0, 0});
                sampled_shift(data.p[0], at, count, rows, {shift + G * pitch, sums, sums + pitch, 0, 0});
                sampled_shift(data.p[2], at, count, rows, {shift + U * pitch, sums, sums + pitch, 0, 0});
            }
            for (; i + STEP <= rows.width; i += STEP)
                sum_columns<COUNT, false>(data, at + i, 0, count, rows.stride, pitch, shift + i, sums + i);
            for (int64_t left; (left = rows.width - i) > 0; i += LANES<F>)
                sum_columns<1, true>(data, at + i, left < LANES<F> ? left : LANES<F>, count, rows.stride, pitch, shift + i, sums + i);
            merge_covariances(n, (double)count, rows.width, pitch, shift, sums, totals);
            n += (double)count;
        }
}

// ---- results

template <class F, int N> struct Coefficients { Register<F> c[N]; };

template <int N, class F> INLINE Coefficients<F, N> coefficients_at(const F* c, int64_t pitch, int64_t i) {
    Coefficients<F, N> found;
    UNROLL for (int j = 0; j < N; j++) found.c[j] = load(c + j * pitch + i);
    return found;
}

// (x - c0) c1 + c2
template <bool PART, class T>
INLINE Register<In<T>> value(Data<T, 1> data, int64_t at, int64_t left, const Coefficients<In<T>, 3>& k) {
    return fused(read<PART>(data.p[0] + at, left, k.c[0]) - k.c[0], k.c[1], k.c[2]);
}
// c1 (g - c3 + c2 (x - c0))
template <bool PART, class T>
INLINE Register<In<T>> value(Data<T, 2> data, int64_t at, int64_t left, const Coefficients<In<T>, 4>& k) {
    Register<In<T>> g = read<PART>(data.p[0] + at, left, k.c[3]), x = read<PART>(data.p[1] + at, left, k.c[0]);
    return k.c[1] * fused(k.c[2], x - k.c[0], g - k.c[3]);
}
// c0 g
template <bool PART, class T>
INLINE Register<In<T>> value(Data<T, 1> data, int64_t at, int64_t left, const Coefficients<In<T>, 1>& k) {
    return read<PART>(data.p[0] + at, left, k.c[0]) * k.c[0];
}

// Both results of the second order, (c1 (u - c8) + c2 (x - c0) + c3, c4 (x - c0) + c2 (g - c7) + c5 (u - c8) + c6).
template <bool PART, class T>
INLINE void put_both(Data<T, 3> data, T* const* y, int64_t at, int64_t left, const Coefficients<In<T>, 9>& k) {
    auto c = k.c;
    Register<In<T>> x = read<PART>(data.p[1] + at, left, c[0]) - c[0];
    Register<In<T>> g = read<PART>(data.p[0] + at, left, c[7]) - c[7];
    Register<In<T>> u = read<PART>(data.p[2] + at, left, c[8]) - c[8];
    write<PART, false>(y[0] + at, left, c[1] * u + (c[2] * x + c[3]));
    write<PART, false>(y[1] + at, left, c[4] * x + (c[2] * g + (c[5] * u + c[6])));
}
// The same with given statistics, (c1 u + c2 (x - c0) + c3, c2 g).
template <bool PART, class T>
INLINE void put_both(Data<T, 3> data, T* const* y, int64_t at, int64_t left, const Coefficients<In<T>, 4>& k) {
    auto c = k.c;
    Register<In<T>> x = read<PART>(data.p[1] + at, left, c[0]) - c[0];
    Register<In<T>> g = read<PART>(data.p[0] + at, left, c[0]), u = read<PART>(data.p[2] + at, left, c[0]);
    write<PART, false>(y[0] + at, left, fused(c[1], u, fused(c[2], x, c[3])));
    write<PART, false>(y[1] + at, left, c[2] * g);
}

// The results of rows of 64 lanes: their coefficients stay in registers.
template <int K, bool STREAM, class T, int N>
static void put_64(Data<T, N> data, T* y, int64_t at, int64_t rows, int64_t pitch, const In<T>* c) {
    typedef In<T> F;
    constexpr int COUNT = 64 / LANES<F>;
    Coefficients<F, K> k[COUNT];
    UNROLL for (int i = 0; i < COUNT; i++) k[i] = coefficients_at<K>(c, pitch, i * LANES<F>);
    for (int64_t row = at; row < at + 64 * rows; row += 64)
        UNROLL for (int i = 0; i < COUNT; i++) {
            int64_t here = row + i * LANES<F>;
            write<false, STREAM>(y + here, 0, value<false>(data, here, 0, k[i]));
        }
}

template <int K, bool STREAM, class T, int N>
static void put_lanes(Data<T, N> data, T* y, int64_t at, int64_t rows, int64_t stride, int64_t width, int64_t pitch, const In<T>* c) {
    typedef In<T> F;
    if (width % LANES<F> == 0) {  // without a part of a register, all pointers stay in registers
        for (int64_t end = at + rows * stride; at < end; at += stride)
            for (int64_t i = 0; i < width; i += LANES<F>)
                write<false, STREAM>(y + at + i, 0, value<false>(data, at + i, 0, coefficients_at<K>(c, pitch, i)));
        return;
    }
    for (int64_t end = at + rows * stride; at < end; at += stride)
        each_register<F>(width, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
            constexpr bool PART = decltype(part)::value;
            write<PART, STREAM>(y + at + i, left, value<PART>(data, at + i, left, coefficients_at<K>(c, pitch, i)));
        });
}

template <int K, bool STREAM, class T, int N>
static void put_rows(Data<T, N> data, T* y, Rows rows, int64_t pitch, const In<T>* c) {
    for (const Span* s = rows.first; s < rows.last; s++)
        each_part(s->start * rows.stride, s->stop - s->start, rows.width, rows.lead, [&](int64_t at, int64_t some, int64_t width, int64_t lane) {
            if (rows.stride == 64 && width == 64) put_64<K, STREAM>(data, y, at, some, pitch, c + lane);
            else if (lane < rows.width) put_lanes<K, STREAM>(data, y, at, some, rows.stride, width, pitch, c + lane);
            else put_lanes<K, false>(data, y, at, some, rows.stride, width, pitch, c + lane);  // before the first line
        });
}

// Each element's `value`.
template <int K, class T, int N>
static void results(Data<T, N> data, T* y, Rows rows, int64_t pitch, const In<T>* c, bool streams) {
    if (CAN_STREAM<T> && streams) put_rows<K, CAN_STREAM<T>>(data, y, rows, pitch, c);
    else put_rows<K, false>(data, y, rows, pitch, c);
}

template <int K, class T>
static void both_results(Data<T, 3> data, T* const* y, Rows rows, int64_t pitch, const In<T>* c) {
    for (const Span* s = rows.first; s < rows.last; s++)
        for (int64_t at = s->start * rows.stride; at < s->stop * rows.stride; at += rows.stride)
            each_register<In<T>>(rows.width, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
                put_both<decltype(part)::value>(data, y, at + i, left, coefficients_at<K>(c, pitch, i));
            });
}

}  // namespace WEFT_ISA
}  // namespace weft
