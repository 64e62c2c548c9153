import cython


cdef class Task:
    cdef public object owner
    cdef public long start, rows
    cdef public bint low
    cdef public Batch batch
    cdef public Queue queue


cdef class Batch:
    cdef public list tasks
    cdef public long rows
    cdef public double opened, due
    cdef public str reason
    cdef public bint is_taken, has_gone
    cdef public tuple allowed

    cpdef add(self, object task)


cdef class Queue:
    cdef public object closed, key, low
    cdef public long low_rows
    cdef public Batch open
    cdef public double used


cdef class Scheduler:
    cdef public object limits
    cdef public long target, running, waiting
    cdef public dict queues
    cdef public list moved
    cdef long _most, _next
    cdef bint _is_plain
    cdef list _order
    cdef object _pace

    @cython.locals(rows=long, found=Queue, queue=Queue, batch=Batch)
    cpdef bint put(self, object key, object task, double now) except -1
    cdef _put_whole(self, Queue queue, object task, double now)
    cdef _put_split(self, Queue queue, object task, double now)
    @cython.locals(batch=Batch)
    cdef _append(self, Queue queue, object task, double now)
    cdef _put_low(self, Queue queue, object task, double now)
    cpdef Batch take(self, double now)
    cpdef release(self, Batch batch, double now)
    @cython.locals(queue=Queue, batch=Batch)
    cdef Batch _take_in_turn(self, double now)
    @cython.locals(batch=Batch)
    cdef Batch _ready(self, Queue queue, double now)
    @cython.locals(batch=Batch)
    cdef Batch _close_open(self, Queue queue, str reason, bint wait=*)
    cdef Batch _ready_low(self, Queue queue, object low, double now)
    cdef Batch _ready_merged(self, Queue queue, object low, double now)
