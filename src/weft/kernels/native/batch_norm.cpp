// Batch norm: what each thread does until all tasks of a call are done. Compiled once for each instruction set.
//
// A task first reduces its part of the data to sums per channel. The thread that finishes the last sums combines them, in
// order, and all threads take tasks again for the results, the last task first: what was read last is still in a cache.
// Passes with given statistics need no sums for their results: a task does both at once. So does a task that has all
// elements of its channels, which combines its sums itself.
#include "planes.h"

namespace weft {
namespace WEFT_ISA {

typedef Register<double> D;  // one value for each of some channels

INLINE int64_t add(Counter& counter) { return __atomic_fetch_add(&counter.value, 1, __ATOMIC_SEQ_CST); }
INLINE int64_t look(const Counter& counter) { return __atomic_load_n(&counter.value, __ATOMIC_SEQ_CST); }

// ---- sums of lanes by channel

static void fold(const double* values, double* sums, int64_t width, int64_t channels) {
    for (int64_t c = 0; c < channels && c < width; c++) sums[c] = values[c];
    for (int64_t i = channels; i < width; i += channels)
        for (int64_t c = 0; c < channels; c++) sums[c] += values[i + c];
}

// Sums of centred products: those within lanes, and those between the lanes of one channel. Lanes with equal sums add 0 exactly.
static void fold_products(double n, const double* a, const double* b, const double* products, const double* sum_a,
                          const double* sum_b, double* sums, int64_t width, int64_t channels) {
    fold(products, sums, width, channels);
    if (width <= channels) return;
    double lanes = (double)(width / channels), portion = 1 / (n * lanes * lanes);
    for (int64_t i = 0; i < width; i += channels)
        for (int64_t c = 0; c < channels; c++)
            sums[c] += (lanes * a[i + c] - sum_a[c]) * portion * (lanes * b[i + c] - sum_b[c]);
}

// ---- a task, and what all passes share

template <class T, Pass PASS> struct Task {
    typedef In<T> F;
    static constexpr Arity COUNTS = ARITY[PASS];
    Job& job;
    const Plan& plan;
    int64_t unit, chunk, thread;
    Span channels;
    int64_t first;  // the channel that the arrays, sums and coefficients of rows are given from

    Task(Job& job, int64_t task, int64_t thread)
        : job(job), plan(*job.plan), unit(task % plan.units), chunk(task / plan.units), thread(thread),
          channels(plan.channels_of(unit)), first(is_rows() ? channels.start : 0) {}

    template <class... Index> Data<T, sizeof...(Index)> data(Index... i) const { return {{(const T*)job.inputs[i] + first...}}; }
    T* output(int i) const { return (T*)job.outputs[i] + first; }
    const F* row(int i) const { return (const F*)job.coefficients + i * plan.coefficient_pitch + first; }
    double* sums(int i) const { return job.sums + (chunk * COUNTS.sums + i) * plan.pad + first; }
    bool is_rows() const { return plan.depth == 1; }
    Rows rows() const { return rows_of(plan, unit, chunk); }
    Planes planes() const { return planes_of(plan, unit, chunk); }

    // The thread's room.
    double* wide() const { return (double*)(job.scratch + thread * job.scratch_bytes); }
    template <int N> Scratch<F> scratch(Data<T, N> data, double* first, double* second) const {
        F* s1 = apart(data, is_rows() ? rows().lead : 0, (F*)(wide() + MOMENTS * plan.pitch));
        return {s1 + 2 * plan.pitch, s1, s1 + plan.pitch, first, second};
    }

    // The sums of g and of g (x - shift).
    void add_products(Data<T, 2> data, const F* shift) const {
        if (is_rows()) {
            Scratch<F> to = scratch(data, wide(), wide() + plan.pitch);
            to.shift = (F*)shift;
            Rows rows = this->rows();
            add_up(data, 0, rows, to);
            fold(to.sums, sums(0), rows.width, plan.channels);
            fold(to.others, sums(1), rows.width, plan.channels);
        } else {
            Planes planes = this->planes();
            Scratch<F> to = scratch(data, sums(0) + planes.begin, sums(1) + planes.begin);
            to.shift = (F*)shift + planes.begin;
            add_up(data, planes, to);
        }
    }

    template <int K, int N> void put(Data<T, N> data) const {
        T* y = output(0);
        // A short chunk, and the first unit of several, need not begin at a line.
        bool streams = plan.streams && chunk != plan.short_chunk && (plan.units == 1 || unit > 0 || plan.lead == 0);
        if (is_rows()) results<K>(data, y, rows(), plan.coefficient_pitch, row(0), streams);
        else results<K>(data, y, planes(), unit, plan, row(0));
    }
    template <int K> void put_two(Data<T, 3> data) const {
        T* const y[2] = {output(0), output(1)};
        if (is_rows()) both_results<K>(data, y, rows(), plan.coefficient_pitch, row(0));
        else both_results<K>(data, y, planes(), unit, plan, row(0));
    }
};

// A register of channels of a call, or ONE of them: their vectors, and their sums over all chunks.
template <class F, Pass PASS, bool ONE> struct Channels {
    Job& job;
    const Plan& plan;
    int64_t i;  // the first

    static D get(const double* p) {
        if constexpr (ONE) return all(*p);
        else return load(p);
    }
    template <class V> static void put(V* p, D v) {
        if constexpr (ONE) *p = (V)v[0];
        else store_narrow(p, v);
    }
    D vector(int k) const { return get(job.vectors[k] + i); }
    D rounded(D v) const { return job.is_wide ? v : WEFT_ISA::rounded<float>(v); }
    void make(int k, D v) const { put(job.made[k] + i, rounded(v)); }
    void coefficient(int k, D v) const { put((F*)job.coefficients + k * plan.coefficient_pitch + i, v); }

    D at(int64_t chunk, int which) const { return get(job.sums + (ARITY[PASS].sums * chunk + which) * plan.pad + i); }
    D sum(int which) const {
        D found = {};
        for (int64_t k = 0; k < plan.chunks; k++) found += at(k, which);
        return found;
    }
    // Centred products of the sums a and b: those within chunks, and those between their means. Equal means add 0 exactly.
    D scatter(int which, int a, D mean_a, int b, D mean_b) const {
        D found = {};
        for (int64_t k = 0; k < plan.chunks; k++) {
            double n = (double)plan.counts[k];
            D da = at(k, a) - n * mean_a, db = at(k, b) - n * mean_b;
            found += at(k, which) + da * (1 / n) * db;
        }
        return found;
    }
};

// ---- the passes: the sums and the results of a task, and the coefficients of some channels, before and after the sums

template <class T, Pass PASS> struct Kernel;

template <class T> struct Kernel<T, FORWARD> : Task<T, FORWARD> {
    using Task<T, FORWARD>::Task;

    void sum() const {
        auto data = this->data(0);
        double *sums = this->sums(0), *squares = this->sums(1);
        if (this->is_rows()) {
            auto to = this->scratch(data, this->wide(), this->wide() + this->plan.pitch);
            Rows rows = this->rows();
            int64_t channels = this->plan.channels;
            moments(data, rows, to);
            fold(to.sums, sums, rows.width, channels);
            fold_products((double)rows.count(), to.sums, to.sums, to.others, sums, sums, squares, rows.width, channels);
        } else {
            Planes planes = this->planes();
            moments(data, planes, this->scratch(data, sums + planes.begin, squares + planes.begin));
        }
    }
    template <class C> static void before(const C&) {}
    template <class C> static void after(const C& c) {
        double n = (double)c.plan.count;
        D mean = c.sum(0) / n, variance = c.rounded(c.scatter(1, 0, mean, 0, mean) / n);
        D factor = c.vector(0) / root(variance + c.job.epsilon);
        c.make(0, mean);
        c.make(1, variance);
        c.coefficient(0, mean);
        c.coefficient(1, factor);
        D lost = (mean - c.rounded(mean)) * factor;  // by rounding the mean; with an infinite factor nothing is lost
        c.coefficient(2, c.vector(1) - (lost - lost == 0.0 ? lost : D{}));
    }
    void put_results() const { this->template put<3>(this->data(0)); }
};

template <class T> struct Kernel<T, INFERENCE> : Task<T, INFERENCE> {
    using Task<T, INFERENCE>::Task;

    void sum() const {}
    template <class C> static void before(const C& c) {
        c.coefficient(0, c.vector(2));
        c.coefficient(1, c.vector(0) / root(c.vector(3) + c.job.epsilon));
        c.coefficient(2, c.vector(1));
    }
    template <class C> static void after(const C&) {}
    void put_results() const { this->template put<3>(this->data(0)); }
};

template <class T> struct Kernel<T, GRAD> : Task<T, GRAD> {
    using Task<T, GRAD>::Task;

    void sum() const { this->add_products(this->data(0, 1), this->row(0)); }
    template <class C> static void before(const C& c) { c.coefficient(0, c.vector(1)); }
    template <class C> static void after(const C& c) {
        double n = (double)c.plan.count;
        D sum_g = c.sum(0), sum_gx = c.sum(1), r = 1 / root(c.vector(2) + c.job.epsilon), scale = c.vector(0) * r;
        c.make(0, r * sum_gx);
        c.make(1, sum_g);
        c.coefficient(1, scale);
        c.coefficient(2, -r * r * (sum_gx / n));
        c.coefficient(3, sum_g / n);
    }
    void put_results() const { this->template put<4>(this->data(0, 1)); }
};

template <class T> struct Kernel<T, INFERENCE_GRAD> : Task<T, INFERENCE_GRAD> {
    using Task<T, INFERENCE_GRAD>::Task;

    void sum() const { this->add_products(this->data(0, 1), this->row(1)); }
    template <class C> static void before(const C& c) {
        c.coefficient(0, c.vector(0) / root(c.vector(2) + c.job.epsilon));
        c.coefficient(1, c.vector(1));
    }
    template <class C> static void after(const C& c) {
        c.make(0, c.sum(1) / root(c.vector(2) + c.job.epsilon));
        c.make(1, c.sum(0));
    }
    void put_results() const { this->template put<1>(this->data(0)); }
};

template <class T> struct Kernel<T, GRAD_GRAD> : Task<T, GRAD_GRAD> {
    using Task<T, GRAD_GRAD>::Task;
    typedef In<T> F;

    void sum() const {
        auto data = this->data(0, 1, 2);
        double* totals = this->wide();
        if (!this->is_rows()) {
            Planes planes = this->planes();
            for (int64_t channel = planes.begin; channel < planes.end; channel++) {
                covariances(data, planes, channel, totals);
                for (int m = 0; m < MOMENTS; m++) this->sums(m)[channel] = totals[m * LANES<double>];
            }
            return;
        }
        Rows rows = this->rows();
        int64_t pitch = this->plan.pitch, channels = this->plan.channels;
        F* shift = (F*)(totals + MOMENTS * pitch);
        covariances(data, rows, pitch, shift, shift + 3 * pitch, totals);
        for (int m = X; m <= U; m++) fold(totals + m * pitch, this->sums(m), rows.width, channels);
        constexpr int PAIRS[][3] = {{XX, X, X}, {GX, G, X}, {UX, U, X}, {UG, U, G}};
        for (auto& p : PAIRS)
            fold_products((double)rows.count(), totals + p[1] * pitch, totals + p[2] * pitch, totals + p[0] * pitch,
                          this->sums(p[1]), this->sums(p[2]), this->sums(p[0]), rows.width, channels);
    }
    template <class C> static void before(const C&) {}
    // The formulas are those of kernels/reference.py.
    template <class C> static void after(const C& k) {
        double n = (double)k.plan.count;
        D x = k.sum(X) / n, g = k.sum(G) / n, u = k.sum(U) / n;
        D xx = k.scatter(XX, X, x, X, x) / n, gx = k.scatter(GX, G, g, X, x) / n;
        D ux = k.scatter(UX, U, u, X, x) / n, ug = k.scatter(UG, U, u, G, g) / n;
        D r = 1 / root(xx + k.job.epsilon), r3 = r * r * r, scale = k.vector(0), a = k.vector(1), b = k.vector(2);
        D by_gx = a * r - scale * r3 * ux, by_ux = -scale * r3 * gx;
        D by_x = -r3 * (scale * (ug - 3.0 * r * r * gx * ux) + a * gx);
        D lost = x - k.rounded(x);  // when the mean is rounded
        k.make(0, n * r * (ug - r * r * gx * ux));
        const D all[] = {x, scale * r, by_gx, b - by_gx * lost, by_x, by_ux, -by_x * lost, g, u};
        UNROLL for (int i = 0; i < 9; i++) k.coefficient(i, all[i]);
    }
    void put_results() const { this->template put_two<9>(this->data(0, 1, 2)); }
};

template <class T> struct Kernel<T, INFERENCE_GRAD_GRAD> : Task<T, INFERENCE_GRAD_GRAD> {
    using Task<T, INFERENCE_GRAD_GRAD>::Task;

    void sum() const { this->add_products(this->data(2, 0), this->row(4)); }
    template <class C> static void before(const C& c) {
        D r = 1 / root(c.vector(2) + c.job.epsilon);
        const D all[] = {c.vector(1), c.vector(0) * r, c.vector(3) * r, c.vector(4), D{}};
        UNROLL for (int i = 0; i < 5; i++) c.coefficient(i, all[i]);
    }
    template <class C> static void after(const C& c) { c.make(0, c.sum(1) / root(c.vector(2) + c.job.epsilon)); }
    void put_results() const { this->template put_two<4>(this->data(0, 1, 2)); }
};

// ---- what each thread runs

// The number of the calling thread, and of its share: that of its last job, if no other thread has it.
static int64_t enter(Job& job) {
    int64_t share = last_share();
    while (share >= job.threads || add(job.taken[2 * job.threads + share]) > 0) share = share + 1 < job.threads ? share + 1 : 0;
    return last_share() = share;
}

// A task nobody has taken, -1 if there is none left: out of the thread's own share, then out of others'.
//
// A share is a run of tasks. So threads do not prefetch into each other's results, and find what they read for their sums in
// their own caches.
INLINE int64_t next_task(Job& job, int64_t thread, bool is_last_sweep) {
    int64_t tasks = job.plan->tasks(), threads = job.threads;
    for (int64_t i = 0; i < threads; i++) {
        int64_t share = (thread + i) % threads, first = share * tasks / threads, last = (share + 1) * tasks / threads;
        Counter& counter = job.taken[share + (is_last_sweep ? threads : 0)];
        if (look(counter) >= last - first) continue;  // costs the thread that has the counter less than `add`
        int64_t taken = add(counter);
        if (taken < last - first) return is_last_sweep ? last - 1 - taken : first + taken;
    }
    return -1;
}

template <class F> static void repeat_channels(const Job& job, int count) {
    const Plan& plan = *job.plan;
    for (int k = 0; k < count; k++) {
        F* row = (F*)job.coefficients + k * plan.coefficient_pitch;
        for (int64_t i = plan.channels; i < plan.lanes + plan.lead; i++) row[i] = row[i - plan.channels];
    }
}

template <class T, Pass PASS> static void before(Job* job) {
    const Plan& plan = *job->plan;
    for (int64_t i = 0; i < plan.channels; i += LANES<double>)
        Kernel<T, PASS>::before(Channels<In<T>, PASS, false>{*job, plan, i});
    if (plan.depth == 1) repeat_channels<In<T>>(*job, ARITY[PASS].coefficients);
}

// Whether a pass has its statistics given.
template <Pass PASS> constexpr bool IS_GIVEN = PASS == INFERENCE || PASS == INFERENCE_GRAD || PASS == INFERENCE_GRAD_GRAD;

// Makes results of sums, and the coefficients of the results.
template <class T, Pass PASS> static void combine(Job& job, Span channels) {
    const Plan& plan = *job.plan;
    if constexpr (PASS == GRAD)
        if (plan.depth > 1 && plan.has_whole_channels)  // a task has one channel, and other threads those beside it
            return Kernel<T, PASS>::after(Channels<In<T>, PASS, true>{job, plan, channels.start});
    for (int64_t i = channels.start; i < channels.stop; i += LANES<double>) {
        // What a unit has left over is taken with channels before it: another thread may have those behind it.
        int64_t last = channels.stop - LANES<double>;
        Kernel<T, PASS>::after(Channels<In<T>, PASS, false>{job, plan, i > last && i > channels.start ? last : i});
    }
    if (!IS_GIVEN<PASS> && plan.depth == 1 && plan.units == 1) repeat_channels<In<T>>(job, ARITY[PASS].coefficients);
}

template <class T, Pass PASS> static void work(Job* shared) {
    Job& job = *shared;
    const Plan& plan = *job.plan;
    int64_t thread = enter(job), tasks = plan.tasks();
    bool is_whole = plan.has_whole_channels;
    for (int64_t t; (t = next_task(job, thread, false)) >= 0;) {
        Kernel<T, PASS> task(job, t, thread);
        task.sum();
        if (is_whole || add(job.summed) == tasks - 1) {
            combine<T, PASS>(job, is_whole ? task.channels : Span{0, plan.channels});
            add(job.combined);
        }
        if (IS_GIVEN<PASS> || is_whole) task.put_results();
    }
    if (!IS_GIVEN<PASS> && !is_whole) {
        while (look(job.combined) == 0) yield();
        for (int64_t t; (t = next_task(job, thread, true)) >= 0;) Kernel<T, PASS>(job, t, thread).put_results();
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // results written past the caches are visible from here on
}

#define OF_PASS(F, P) {F<float, P>, F<double, P>, F<half, P>, F<bfloat, P>}
#define OF_ALL(F) \
    {OF_PASS(F, FORWARD), OF_PASS(F, INFERENCE), OF_PASS(F, GRAD), OF_PASS(F, INFERENCE_GRAD), OF_PASS(F, GRAD_GRAD), \
     OF_PASS(F, INFERENCE_GRAD_GRAD)}

extern const Kernels KERNELS = {OF_ALL(before), OF_ALL(work)};

}  // namespace WEFT_ISA
}  // namespace weft
