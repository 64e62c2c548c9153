import cython


cdef class Ticket:
    cdef public object clock, sweeper, value, error, jobs, waiter, then, dispatcher, thread
    cdef public bint done
    cdef public double alarm
    cdef public Ticket outer

    cdef _init_ticket(self, object clock, object sweeper)
    cpdef bint resolve(self, object value) except -1
    cpdef bint reject(self, object error) except -1
    cpdef enter(self)
    cpdef on_alarm(self)
    cpdef list forget(self)
    cpdef abandon(self)
    cpdef result(self)
    cpdef fail(self)
    cpdef outcome(self)
    cpdef wake(self)
    cpdef add_job(self, object job)
    @cython.locals(calls=dict)
    cpdef begin_inside(self)
    @cython.locals(calls=dict, other=Ticket)
    cpdef end_inside(self)
    cpdef wait(self)
    cdef _wait(self)
    cpdef needs_timer(self, object loop)


cpdef Ticket innermost_call()
@cython.locals(ticket=Ticket)
cpdef bint has_threads(list tickets) except -1
@cython.locals(ticket=Ticket, wakeups=list, tasks=list)
cpdef wake_all(list tickets, object last=*)
cpdef wake_each(list woken)
