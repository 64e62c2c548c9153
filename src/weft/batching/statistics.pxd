import cython

from weft.batching.queue cimport Batch


cdef class _TimeCounter:
    cdef public long count
    cdef public double total, longest
    cdef public list buckets
    cdef Py_ssize_t _at
    cdef double _above, _upto

    @cython.locals(at=Py_ssize_t)
    cpdef add(self, double seconds)


cdef class _Tally:
    cdef public long second, padding
    cdef public dict sizes, reasons
    cdef public object counts
    cdef public _TimeCounter waits, runs


cdef class Counters:
    cdef object _clock
    cdef public object _seconds
    cdef double _began
    cdef _Tally _before, _tally

    @cython.locals(tally=_Tally)
    cdef _Tally _now(self, double now)
    @cython.locals(arrived=double, tally=_Tally)
    cpdef batch_ran(self, Batch batch, list arrivals, double ended)
