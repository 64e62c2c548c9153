import cython


cdef class Pending:
    cdef public object clock, sweeper, value, error, jobs, waiter, then
    cdef public bint done
    cdef public double alarm

    cpdef _begin(self, object clock, object sweeper=*)
    cpdef ring(self)
    cpdef abandon(self)
    cpdef result(self)
    cpdef fail(self)
    cpdef outcome(self)
    cpdef wait(self)
    cpdef needs_timer(self, object loop)


cpdef wake(Pending pending)
@cython.locals(pending=Pending)
cpdef bint has_threads(list pendings) except -1
@cython.locals(pending=Pending, bells=list, tasks=list)
cpdef wake_all(list pendings, object last=*)
