from weft.batching.desk cimport Call, Desk


cdef class Form:
    cdef object __weakref__
    cdef public object structure, statics, kinds, mode, key
    cdef public bint pulls, wants_gradient


cdef class Request(Call):
    cdef public Form form
    cdef public object arrays, count, counters, shared, backward, origin, name
    cdef public bint examples, is_attached, is_late

    cpdef bint answer(self, object task, object value) except -1
    cpdef fail(self)
    cpdef part(self, object start, object rows)
    cpdef result(self)
