import cython

from weft.batching.batch_run cimport Run
from weft.batching.call cimport QueuedCall
from weft.batching.dispatcher cimport Dispatcher
from weft.batching.modes cimport has_unkeyed_modes
from weft.batching.queue cimport Batch
from weft.batching.tasks cimport LoopInbox, inbox_of
from weft.core.ticket cimport wake_each


cdef class LoopTurn:
    cdef public LoopDispatcher dispatcher
    cdef public object loop
    cdef public Run taken
    cdef LoopInbox _inbox

    cpdef wake(self)
    cpdef run(self)


cdef class LoopDispatcher(Dispatcher):
    cdef dict _turns, _callers

    @cython.locals(run=Run, batch=Batch)
    cdef Run _take(self, QueuedCall call, double now, list woken)
    cdef LoopTurn _turn(self, object loop)
    cdef list _dispatch(self, double now, QueuedCall me)
    cdef _note_caller(self, QueuedCall call)
    @cython.locals(left=long)
    cpdef bint _leave(self, object call) except -1
    cdef _repair(self)
    cdef bint _have_turns(self) except -1
    cdef _release(self, Run run, list done, double now)
    @cython.locals(run=Run, batch=Batch)
    cpdef take_in_loop(self, LoopTurn turn)
    cpdef drop_turn(self, LoopTurn turn)
