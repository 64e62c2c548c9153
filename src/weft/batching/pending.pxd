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
cpdef wake_all(list pendings, object last=*)
