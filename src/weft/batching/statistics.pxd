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


cdef class Counters:
    cdef dict _sizes, _reasons
    cdef _TimeCounter _waits, _runs
    cdef long _padding, _failed, _rejected, _late, _backwards

    @cython.locals(arrived=double)
    cpdef batch_ran(self, Batch batch, list arrivals, double ended)
