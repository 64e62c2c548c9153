import cython

from weft.batching.queue cimport Batch, Queue
from weft.batching.queue_table cimport QueueTable
from weft.batching.turns cimport Turns


cdef class Scheduler(QueueTable):
    cdef object _pace

    @cython.locals(found=Queue, queue=Queue)
    cpdef Batch put(self, object key, object task, double now)
    @cython.locals(batch=Batch)
    cdef bint _joins_taken(self, Queue queue, object task) except -1
    @cython.locals(batch=Batch)
    cdef bint _goes_on_waiting(self, Queue queue, double now) except -1
    cdef _put_whole(self, Queue queue, object task, double now)
    cdef _put_split(self, Queue queue, object task, double now)
    @cython.locals(batch=Batch)
    cdef _append(self, Queue queue, object task, double now)
    cpdef Batch take(self, double now)
    @cython.locals(queue=Queue)
    cpdef let_join(self, Batch batch)
    @cython.locals(queue=Queue)
    cpdef end_joining(self, Batch batch)
    cpdef release(self, Batch batch, double now)
    @cython.locals(queue=Queue, turns=Turns)
    cdef Batch _take_in_turn(self, double now)
    @cython.locals(batch=Batch)
    cdef Batch _ready(self, Queue queue, double now)
    @cython.locals(batch=Batch)
    cdef Batch _close_open(self, Queue queue, object reason, bint wait=*)
    cdef Batch _ready_low(self, Queue queue, object low, double now)
    cdef Batch _ready_merged(self, Queue queue, object low, double now)
