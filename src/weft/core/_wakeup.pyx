# The wakeups of `wakeup.py` in terms of the interpreter's own locks, which can be rung without holding the interpreter.

from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport INFINITY, ceil

cdef extern from "pythread.h" nogil:
    ctypedef void* PyThread_type_lock
    ctypedef enum PyLockStatus:
        PY_LOCK_FAILURE
        PY_LOCK_ACQUIRED
        PY_LOCK_INTR
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock)
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock, long long, int)
    void PyThread_release_lock(PyThread_type_lock)
    unsigned long PyThread_get_thread_ident()

cdef extern from * nogil:
    """
    #if defined(__GNUC__) && !defined(_WIN32)
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <sched.h>
    #include <time.h>
    static double seconds(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec + 1e-9 * t.tv_nsec;
    }
    static int swap(unsigned long* at, unsigned long from, unsigned long to) {
        return __atomic_compare_exchange_n(at, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    static void put(unsigned long* at, unsigned long to) { __atomic_store_n(at, to, __ATOMIC_SEQ_CST); }
    #else  /* here nobody waits for a turn: it can always be had */
    static double seconds(void) { return 0; }
    static int swap(unsigned long* at, unsigned long from, unsigned long to) { return 1; }
    static void put(unsigned long* at, unsigned long to) {}
    static void sched_yield(void) {}
    #endif
    #if defined(__linux__)
    #include <pthread.h>
    static int core(void) { return sched_getcpu(); }
    static int own_clock(void) {
        clockid_t clock;
        return pthread_getcpuclockid(pthread_self(), &clock) ? CLOCK_MONOTONIC : clock;
    }
    static double worked(int clock) {
        struct timespec t;
        return clock_gettime(clock, &t) ? -1 : t.tv_sec + 1e-9 * t.tv_nsec;
    }
    #else  /* here whoever has not come back is at work */
    static int core(void) { return 0; }
    static int own_clock(void) { return 0; }
    static double worked(int clock) { return seconds(); }
    #endif
    """
    double seconds()
    bint swap(unsigned long*, unsigned long, unsigned long)
    void put(unsigned long*, unsigned long)
    void sched_yield()
    int core()
    int own_clock()
    double worked(int)  # the seconds for which the thread with this clock was at work; negative if it has ended

cdef double TURN = 1e-3  # seconds: a longer turn is not waited for, because the others could work beside it
cdef double USUAL = 300e-6  # seconds: what they may take on the whole
cdef double LOOK = 25e-6  # seconds: how often to see whether the thread whose turn it is works; if not, it is not waited for
cdef int FEW = 4, MANY = 64  # turns that are not waited for after one in vain: each time more, and less again after others
cdef int NEAR = 16  # so many of those that wait are looked through for one on the same core

cdef unsigned long turn = 0  # the thread that left its wakeup last, until it comes to one again
cdef double since = 0.0  # when it left
cdef int clock = 0  # of the time that it works
cdef bint is_alone = False  # whether the one before was asleep
cdef double over = 0.0  # by how much turns have exceeded the usual
cdef int untried = 0, skipped = FEW  # how many turns are not waited for now, and after the next one in vain
cdef Wakeup owed = None  # the one after next, rung by whoever sleeps or leaves first


cdef class Wakeup:
    cdef PyThread_type_lock _lock
    cdef bint _is_released, _has_left, _is_last
    cdef int _core  # that the thread fell asleep on
    cdef list _wave  # the last comes first

    loop = None  # as a waiter: a thread waits, not a task of an event loop

    def __cinit__(self):
        self._lock = PyThread_allocate_lock()
        if self._lock == NULL:
            raise MemoryError
        PyThread_acquire_lock_timed(self._lock, 0, 0)

    def __dealloc__(self):
        if self._lock != NULL:
            if not self._is_released:
                PyThread_release_lock(self._lock)
            PyThread_free_lock(self._lock)

    def locked(self):
        return not self._is_released

    def release(self):
        if _marked(self):
            PyThread_release_lock(self._lock)

    def acquire(self, bint blocking=True, double timeout=-1.0):
        cdef double end = INFINITY
        cdef PyLockStatus status
        if not blocking:
            status = PyThread_acquire_lock_timed(self._lock, 0, 0)
        else:
            if timeout >= 0:
                end = seconds() + timeout
            status = self._sleep(timeout)
            while status == PY_LOCK_INTR:
                PyErr_CheckSignals()
                status = self._sleep(-1.0 if timeout < 0 else max(0.0, end - seconds()))
        if status != PY_LOCK_ACQUIRED:
            return False
        self._is_released = False
        return True

    cdef PyLockStatus _sleep(self, double timeout):
        global owed, since
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef Wakeup other = owed
        cdef bint rings = other is not None and _marked(other)
        cdef long long micros = -1 if timeout < 0 else <long long>ceil(min(timeout, 1e9) * 1e6)
        cdef PyLockStatus status
        owed = None
        with nogil:
            self._core = core()
            if turn == me:
                since = INFINITY  # until the next one has set it
                put(&turn, 0)
            if rings:
                PyThread_release_lock(other._lock)
            status = PyThread_acquire_lock_timed(self._lock, micros, 1)
            if status == PY_LOCK_ACQUIRED:
                _take_turn(me)
        return status

    def leave(self):
        self._has_left = True
        if self._wave is not None:
            _owe_next(self._wave)


def release_in_turn(list wakeups, Wakeup last=None):
    cdef list wave = wakeups[::-1]
    cdef Wakeup wakeup
    if last is not None:
        wave.insert(0, last)
        last._is_last = True
    for wakeup in wave:
        wakeup._wave = wave
    _owe_next(wave, True)
    _owe_next(wave)  # and ring the first


cdef bint _marked(Wakeup wakeup) noexcept:
    """Whether a wakeup is to be rung, which from now on it is; the lock itself may then be opened without the interpreter."""
    if wakeup._is_released:
        return False
    wakeup._is_released = True
    return True


cdef _owe_next(list wave, bint is_first=False):
    """Ring what is owed, and owe the next of a wave."""
    global owed
    cdef Wakeup wakeup = owed
    owed = _next(wave, is_first)
    if wakeup is not None and _marked(wakeup):
        PyThread_release_lock(wakeup._lock)


cdef Wakeup _next(list wave, bint is_first):
    """Who is rung next: if possible one that fell asleep on this core, which is soon free; the first, on another."""
    cdef Py_ssize_t i, end = len(wave) - 1
    cdef int here = core()
    cdef Wakeup wakeup
    for i in range(end, max(end - NEAR, -1), -1):
        wakeup = wave[i]
        if (wakeup._core == here) != is_first and not (wakeup._is_last or wakeup._has_left):
            del wave[i]
            return wakeup
    while wave:
        wakeup = wave.pop()
        if not wakeup._has_left:  # else it may not have seen the wave, so that goes on
            return wakeup
    return None


cdef void _take_turn(unsigned long me) noexcept nogil:
    """Wait until the thread before is asleep again, if it is at work and that does not take long."""
    global since, clock, is_alone, untried
    if untried > 0:
        untried -= 1
        is_alone = False
    else:
        is_alone = _await_turn(me)
    if not is_alone:
        since = INFINITY
        put(&turn, me)
    clock = own_clock()
    since = seconds()


cdef bint _await_turn(unsigned long me) noexcept nogil:
    """Whether the turn is given to this thread; else it takes it."""
    global over, skipped
    cdef double begun, now, looked, before, after
    cdef int watched = clock
    if swap(&turn, 0, me):
        return True
    begun = looked = now = seconds()
    if now - since > TURN:  # as when the one before has run a batch
        return False
    before = worked(watched)
    while not swap(&turn, 0, me):
        now = seconds()
        # The second, because others may take their turn before, and a fork can leave behind one about to set `since`.
        if now - since > TURN or now - begun > MANY * TURN:
            _skip()
            return False
        if now - looked > LOOK:
            after = worked(clock)
            if after < 0:  # it has ended
                return False
            # Beside others it may well sleep until the interpreter is free.
            if is_alone and watched == clock and after - before < (now - looked) / 4:
                _skip()
                return False
            watched, before, looked = clock, after, now
        sched_yield()
    if is_alone and now - begun > LOOK:  # it was seen at work, and nobody was in its way
        over = min(TURN, max(0.0, over + now - begun - USUAL))
        if over == TURN:
            _skip()
        elif over == 0:
            skipped = max(skipped // 2, FEW)
    return True


cdef void _skip() noexcept nogil:
    """Let the next threads go on without waiting."""
    global untried, skipped
    untried = skipped
    skipped = min(2 * skipped, MANY)
