import cython

from weft.batching.modes cimport jax_mode, torch_mode
from weft.batching.request cimport BatchKey, CallContext, Request


cdef class Arguments:
    cdef public object _keys
    cdef object _parameters, _filled, _missed, _items, _mask, _places, _rows, _ruled, _rules, _shared, _user_key, _cost
    cdef object _name, _unsure
    cdef bint _has_rows, _has_warned, _has_waste, _is_plain
    cdef BatchKey _last

    @cython.locals(request=Request)
    cpdef Request request(self, CallContext context, tuple args, dict kwargs, bint is_vjp)
    cpdef Request _checked_request(self, CallContext context, tuple args, dict kwargs, bint is_vjp)
    @cython.locals(key=BatchKey, count=Py_ssize_t)
    cdef Request _plain_request(self, CallContext context, tuple args, bint is_vjp)
    @cython.locals(key=BatchKey)
    cdef BatchKey _plain_key(self, object x, object mode, object jax, bint is_vjp)
    cpdef apply(self, object f, BatchKey key, object arrays, object others, object count, object size)
