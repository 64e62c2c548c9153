// Batch norm's loops over channels-first data.
//
// The data is seen as rows of `channels` planes of `depth` elements in one piece. A task takes the elements
// `start : stop` of the planes of some channels, in the order of memory: the planes of one row lie side by side. Each
// channel's sums run in the computing dtype over a block of about PLANE_BLOCK elements, in 16 lanes, and from block to
// block in double.
#pragma once
#include "rows.h"

namespace weft {
namespace WEFT_ISA {

constexpr int64_t PLANE_BLOCK = 4096;

struct Planes {
    const Span *first, *last;
    int64_t channels, depth;
    int64_t begin, end;    // channels
    int64_t start, stop;   // elements of their planes
};

INLINE Planes planes_of(const Plan& plan, int64_t unit, int64_t chunk) {
    int64_t group = chunk / plan.parts, part = chunk % plan.parts, stop = (part + 1) * plan.part;
    Span some = plan.channels_of(unit);
    return {
        plan.spans + plan.groups[group], plan.spans + plan.groups[group + 1], plan.channels, plan.depth,
        some.start, some.stop, part * plan.part, stop < plan.depth ? stop : plan.depth,
    };
}

// About the mean of some elements, from the distances of `count` vectors of them to the first: exact if a channel is
// constant, and rounded as in rows.h.
template <class T> static double sampled_shift(const T* x, int64_t width, int64_t count) {
    typedef In<T> F;
    double first = load_part(x, 1, Register<F>{})[0];
    if (width < 16) return first;
    Register<F> k = all((F)first), a[REGISTERS<F>] = {}, b[REGISTERS<F>] = {};
    int64_t n = 0, step = width / count > 16 ? width / count : 16;
    for (int64_t i = 0; i < width - 15; i += step, n += 16)
        UNROLL for (int j = 0; j < REGISTERS<F>; j++) {
            Register<F> d = load(x + i + j * LANES<F>) - k;
            a[j] += d, b[j] += d * d;
        }
    double coarse = (F)(COARSE * root(total<F>(b) / (double)n));
    double shift = (double)(F)(first + total<F>(a) / (double)n + coarse) - coarse;
    return is_finite(shift) ? shift : first;
}

// ---- sums

// Adds the terms of `width` elements to 16 sums of each.
template <class T, int N> INLINE void add_terms(Data<T, N> data, int64_t at, int64_t width, In<T> shift, In<T>* s1, In<T>* s2) {
    typedef In<T> F;
    constexpr int R = REGISTERS<F>, L = LANES<F>;
    Register<F> k = all(shift), a[R] = {}, b[R] = {};
    int64_t stop = at + width;
    for (; at + 64 <= stop; at += 64)
        UNROLL for (int j = 0; j < R; j++) {
            Register<F> d = {};
            Register<F> c0 = terms<false>(data, at + j * L, 0, k, d), c1 = terms<false>(data, at + 16 + j * L, 0, k, d);
            Register<F> c2 = terms<false>(data, at + 32 + j * L, 0, k, d), c3 = terms<false>(data, at + 48 + j * L, 0, k, d);
            a[j] += (c0 + c1) + (c2 + c3), b[j] += d;
        }
    for (; at + 16 <= stop; at += 16)
        UNROLL for (int j = 0; j < R; j++) a[j] += terms<false>(data, at + j * L, 0, k, b[j]);
    UNROLL for (int j = 0; j < R; j++, at += L) {
        int64_t left = stop - at;
        if (left >= L) a[j] += terms<false>(data, at, 0, k, b[j]);
        else if (left > 0) a[j] += terms<true>(data, at, left, k, b[j]);
    }
    UNROLL for (int j = 0; j < R; j++) {
        store(s1 + j * L, load(s1 + j * L) + a[j]);
        store(s2 + j * L, load(s2 + j * L) + b[j]);
    }
}

// Each channel's sums of both terms; returns the number of elements.
template <class T, int N> static double add_up(Data<T, N> data, Planes planes, Scratch<In<T>> to) {
    typedef In<T> F;
    int64_t n = 0, stride = planes.channels * planes.depth, tile = planes.end - planes.begin;
    int64_t length = planes.stop - planes.start, many = PLANE_BLOCK / length > 1 ? PLANE_BLOCK / length : 1;
    for (int64_t i = 0; i < tile; i++) to.sums[i] = to.others[i] = 0;  // no more: other threads have the next ones
    for (const Span* s = planes.first; s < planes.last; s++)
        for (int64_t row = s->start; row < s->stop; row += many) {
            int64_t rows = s->stop - row < many ? s->stop - row : many;
            for (int64_t part = planes.start; part < planes.stop; part += PLANE_BLOCK) {
                int64_t width = planes.stop - part < PLANE_BLOCK ? planes.stop - part : PLANE_BLOCK;
                int64_t at = row * stride + planes.begin * planes.depth + part;
                clear(to.s1, 16 * tile);
                clear(to.s2, 16 * tile);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t i = 0; i < tile; i++)
                        add_terms(data, at + r * stride + i * planes.depth, width, to.shift[i], to.s1 + 16 * i, to.s2 + 16 * i);
                for (int64_t i = 0; i < tile; i++) {
                    Register<F> a[REGISTERS<F>], b[REGISTERS<F>];
                    UNROLL for (int j = 0; j < REGISTERS<F>; j++) {
                        a[j] = load(to.s1 + 16 * i + j * LANES<F>);
                        b[j] = load(to.s2 + 16 * i + j * LANES<F>);
                    }
                    to.sums[i] += total<F>(a);
                    to.others[i] += total<F>(b);
                }
                n += rows * width;
            }
        }
    return (double)n;
}

// Each channel's sum in `sums`, and its sum of squared distances from its mean in `others`.
template <class T> static void moments(Data<T, 1> data, Planes planes, Scratch<In<T>> to) {
    typedef In<T> F;
    int64_t plane = planes.first->start * planes.channels + planes.begin;
    for (int64_t i = 0; i < planes.end - planes.begin; i++)
        to.shift[i] = (F)sampled_shift(data.p[0] + (plane + i) * planes.depth + planes.start, planes.stop - planes.start, 4);
    double n = add_up(data, planes, to);
    for (int64_t i = 0; i < planes.end - planes.begin; i++) {
        double between = to.sums[i] * to.sums[i] / n;
        if (!(between <= 4 * (to.others[i] - between))) {
            // The shift is more than two standard deviations away from the mean: sum again, from the mean.
            F mean = (F)(to.shift[i] + to.sums[i] / n);
            to.shift[i] = is_finite(mean) ? mean : 0;
            Planes one = planes;
            one.begin = planes.begin + i, one.end = one.begin + 1;
            add_up(data, one, {to.shift + i, to.s1, to.s2, to.sums + i, to.others + i});
        }
        double a = to.sums[i], square = to.others[i] - a * a / n;
        to.sums[i] = n * to.shift[i] + a;
        to.others[i] = square < 0 ? 0 : square;
    }
}

// ---- means and covariances of x, g and u

// The MOMENTS of `rows` parts of planes, measured from the shifts: every LANES<double> a number.
template <class T>
static void block_covariances(Data<T, 3> data, int64_t at, int64_t rows, int64_t stride, int64_t width, const double* shift, double* sums) {
    typedef In<T> F;
    constexpr int R = REGISTERS<F>, L = LANES<F>;
    Register<F> kx = all((F)shift[X * LANES<double>]), kg = all((F)shift[G * LANES<double>]), ku = all((F)shift[U * LANES<double>]), s[MOMENTS][R] = {};
    auto add = [&](int64_t here, int64_t left, int j, auto part) __attribute__((always_inline)) {
        constexpr bool PART = decltype(part)::value;
        Register<F> dg = read<PART>(data.p[0] + here, left, kg) - kg;
        Register<F> dx = read<PART>(data.p[1] + here, left, kx) - kx;
        Register<F> du = read<PART>(data.p[2] + here, left, ku) - ku;
        s[X][j] += dx, s[G][j] += dg, s[U][j] += du;
        s[XX][j] = fused(dx, dx, s[XX][j]), s[GX][j] = fused(dg, dx, s[GX][j]);
        s[UX][j] = fused(du, dx, s[UX][j]), s[UG][j] = fused(du, dg, s[UG][j]);
    };
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i += 16)
            UNROLL for (int j = 0; j < R; j++) {
                int64_t left = width - i - j * L;
                if (left >= L) add(at + r * stride + i + j * L, 0, j, Bool<false>());
                else if (left > 0) add(at + r * stride + i + j * L, left, j, Bool<true>());
            }
    UNROLL for (int m = 0; m < MOMENTS; m++) sums[m * LANES<double>] = total<F>(s[m]);
}

// One channel's MOMENTS in `totals`, every LANES<double> a number.
template <class T> static void covariances(Data<T, 3> data, Planes planes, int64_t channel, double* totals) {
    typedef In<T> F;
    constexpr int L = LANES<double>;
    double n = 0, shift[3 * L] = {}, sums[MOMENTS * L] = {};
    int64_t length = planes.stop - planes.start, block = PLANE_BLOCK / 4, many = block / length > 1 ? block / length : 1;
    clear(totals, MOMENTS * L);
    for (const Span* s = planes.first; s < planes.last; s++)
        for (int64_t row = s->start; row < s->stop; row += many) {
            int64_t rows = s->stop - row < many ? s->stop - row : many;
            for (int64_t part = planes.start; part < planes.stop; part += block) {
                int64_t width = planes.stop - part < block ? planes.stop - part : block;
                int64_t at = (row * planes.channels + channel) * planes.depth + part;
                if (n == 0) {
                    shift[X * L] = sampled_shift(data.p[1] + at, width, 16);
                    shift[G * L] = sampled_shift(data.p[0] + at, width, 16);
                    shift[U * L] = sampled_shift(data.p[2] + at, width, 16);
                }
                block_covariances(data, at, rows, planes.channels * planes.depth, width, shift, sums);
                merge_covariances<double>(n, (double)(rows * width), 1, L, shift, sums, totals);
                for (int j = X; j <= U; j++) shift[j * L] = (double)(F)shift[j * L];
                n += (double)(rows * width);
            }
        }
}

// ---- results

template <int N, class F> INLINE Coefficients<F, N> coefficients_of(const F* c, int64_t pitch, int64_t channel) {
    Coefficients<F, N> found;
    UNROLL for (int j = 0; j < N; j++) found.c[j] = all(c[j * pitch + channel]);
    return found;
}

// Calls each(at, left, channel coefficients, PART) for all registers of some planes that lie side by side. Whole registers
// begin `plan.lead` elements after a plane's begin.
template <int K, class F, class Each>
INLINE void each_plane(Planes planes, int64_t plane, int64_t end, const Plan& plan, const F* c, Each each) {
    int64_t length = planes.stop - planes.start, channel = plane % planes.channels;
    int64_t pitch = plan.coefficient_pitch, lead = plan.lead;  // stores of results may be to `plan`, as far as compilers know
    for (; plane < end; plane++) {
        Coefficients<F, K> k = coefficients_of<K>(c, pitch, channel);
        int64_t at = plane * planes.depth + planes.start;
        for (int64_t i = 0; i < lead; i += LANES<F>) each(at + i, lead - i < LANES<F> ? lead - i : LANES<F>, k, Bool<true>());
        each_register<F>(length - lead, [&](int64_t i, int64_t left, auto part) __attribute__((always_inline)) {
            each(at + lead + i, left, k, part);
        });
        channel = channel + 1 < planes.channels ? channel + 1 : 0;
    }
}

// The same for the planes of a task: its channels if it has all their elements, otherwise one of the plan's shares of all
// planes, which lie side by side, whatever their channels.
template <int K, class F, class Each>
INLINE void each_plane_of(Planes planes, int64_t share, const Plan& plan, const F* c, Each each) {
    for (const Span* s = planes.first; s < planes.last; s++) {
        int64_t low = s->start * planes.channels, high = s->stop * planes.channels, step = planes.channels;
        int64_t begin = planes.begin, end = planes.end;
        if (!plan.has_whole_channels) step = high - low, begin = step * share / plan.units, end = step * (share + 1) / plan.units;
        for (int64_t row = low; row < high; row += step) each_plane<K>(planes, row + begin, row + end, plan, c, each);
    }
}

template <int K, bool STREAM, class T, int N>
static void put_planes(Data<T, N> data, T* y, Planes planes, int64_t share, const Plan& plan, const In<T>* c) {
    typedef In<T> F;
    each_plane_of<K>(planes, share, plan, c, [&](int64_t at, int64_t left, const Coefficients<F, K>& k, auto part) __attribute__((always_inline)) {
        constexpr bool PART = decltype(part)::value;
        write<PART, STREAM>(y + at, left, value<PART>(data, at, left, k));
    });
}

// Each element's `value`.
template <int K, class T, int N>
static void results(Data<T, N> data, T* y, Planes planes, int64_t share, const Plan& plan, const In<T>* c) {
    if (CAN_STREAM<T> && plan.streams) put_planes<K, CAN_STREAM<T>>(data, y, planes, share, plan, c);
    else put_planes<K, false>(data, y, planes, share, plan, c);
}

template <int K, class T>
static void both_results(Data<T, 3> data, T* const* y, Planes planes, int64_t share, const Plan& plan, const In<T>* c) {
    typedef In<T> F;
    each_plane_of<K>(planes, share, plan, c, [&](int64_t at, int64_t left, const Coefficients<F, K>& k, auto part) __attribute__((always_inline)) {
        put_both<decltype(part)::value>(data, y, at, left, k);
    });
}

}  // namespace WEFT_ISA
}  // namespace weft
