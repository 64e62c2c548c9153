cdef class Task:
    cdef public object owner, start, rows, queue, batch
    cdef public bint low


cdef class Batch:
    cdef public list tasks
    cdef public object rows, reason, allowed, error, padding, count, rest
    cdef public double opened, due, started
    cdef public bint is_taken, has_departed
    cdef public long number

    cpdef add(self, object task)


cdef class Queue:
    cdef public object closed, key, low, low_rows
    cdef public Batch open, joinable
    cdef public Queue after
    cdef public double last_used, watched
    cdef public long batches
    cdef public bint is_listed
