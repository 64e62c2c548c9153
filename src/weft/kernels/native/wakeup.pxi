# The wakeups of core/wakeup.py made of the interpreter's own locks, which can be released without holding the interpreter lock.
# Included by module.pyx.

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
    #else  /* no atomics: every thread takes its turn at once */
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
    #else  /* no CPU clocks of threads: a thread that is not asleep counts as working */
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
    double worked(int)  # CPU seconds of the thread with this clock; negative if the thread has ended

cdef double TURN = 1e-3  # seconds: the longest turn to wait for; during a longer one other threads could work
cdef double USUAL = 300e-6  # seconds: the longest average turn to wait for
cdef double CHECK = 25e-6  # seconds: how often to check that the thread whose turn it is works
cdef int FEW = 4, MANY = 64  # how many turns are not waited for after a wait in vain: doubled each time, halved after a success
cdef int NEAR = 16  # how many threads of a group are searched for one on the same core

cdef unsigned long turn = 0  # the thread that was woken last, until it sleeps again
cdef double since = 0.0  # when it woke up
cdef int clock = 0  # its CPU clock
cdef bint is_alone = False  # whether the thread before it was asleep
cdef double over = 0.0  # seconds by which turns have exceeded USUAL
cdef int untried = 0, skipped = FEW  # turns that are not waited for now, and after the next wait in vain
cdef Wakeup after_next = None  # is woken by the thread that sleeps or goes on first


cdef class Wakeup:
    cdef PyThread_type_lock _lock
    cdef bint _is_released, _is_over, _is_last
    cdef int _core  # where the thread fell asleep
    cdef list _group  # in reverse order

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
        if _claim(self):
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
        global after_next, since
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef Wakeup other = after_next
        cdef bint wakes = other is not None and _claim(other)
        cdef long long micros = -1 if timeout < 0 else <long long>ceil(min(timeout, 1e9) * 1e6)
        cdef PyLockStatus status
        after_next = None
        with nogil:
            self._core = core()
            if turn == me:
                since = INFINITY  # until the next one has set it
                put(&turn, 0)
            if wakes:
                PyThread_release_lock(other._lock)
            status = PyThread_acquire_lock_timed(self._lock, micros, 1)
            if status == PY_LOCK_ACQUIRED:
                _take_turn(me)
        return status

    def wake_next(self):
        self._is_over = True
        if self._group is not None:
            _move_on(self._group)


def release_in_turn(list wakeups, Wakeup last=None):
    cdef list group = wakeups[::-1]
    cdef Wakeup wakeup
    if last is not None:
        group.insert(0, last)
        last._is_last = True
    for wakeup in group:
        wakeup._group = group
    _move_on(group, True)
    _move_on(group)  # and wake the first


cdef bint _claim(Wakeup wakeup) noexcept:
    """Mark a wakeup as released; False if it was. The lock itself can then be released without the interpreter lock."""
    if wakeup._is_released:
        return False
    wakeup._is_released = True
    return True


cdef _move_on(list group, bint is_first=False):
    """Wake the thread that comes after next, and choose the one after it from `group`."""
    global after_next
    cdef Wakeup wakeup = after_next
    after_next = _next(group, is_first)
    if wakeup is not None and _claim(wakeup):
        PyThread_release_lock(wakeup._lock)


cdef Wakeup _next(list group, bint is_first):
    """Take a thread from the group: if possible one that fell asleep on this core, which is soon free; the first on another."""
    cdef Py_ssize_t i, end = len(group) - 1
    cdef int here = core()
    cdef Wakeup wakeup
    for i in range(end, max(end - NEAR, -1), -1):
        wakeup = group[i]
        if (wakeup._core == here) != is_first and not (wakeup._is_last or wakeup._is_over):
            del group[i]
            return wakeup
    while group:
        wakeup = group.pop()
        if not wakeup._is_over:  # a thread that went on before its turn may not have seen the group
            return wakeup
    return None


cdef void _take_turn(unsigned long me) noexcept nogil:
    """Wait until the thread before is asleep again, if it works and soon sleeps."""
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
    """Wait for the turn; False if this thread must take it without."""
    global over, skipped
    cdef double begun, now, looked, before, after
    cdef int watched = clock
    if swap(&turn, 0, me):
        return True
    begun = looked = now = seconds()
    if now - since > TURN:  # as when the thread before has run a batch
        return False
    before = worked(watched)
    while not swap(&turn, 0, me):
        now = seconds()
        # The second limit, because other threads may take their turn first, and `since` may never be set after a fork.
        if now - since > TURN or now - begun > MANY * TURN:
            _skip()
            return False
        if now - looked > CHECK:
            after = worked(clock)
            if after < 0:  # the thread has ended
                return False
            # Beside other threads it may sleep because it waits for the interpreter lock.
            if is_alone and watched == clock and after - before < (now - looked) / 4:
                _skip()
                return False
            watched, before, looked = clock, after, now
        sched_yield()
    if is_alone and now - begun > CHECK:  # the thread worked, and no other was in its way
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
