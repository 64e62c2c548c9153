from weft.batching.desk cimport Call, Desk


cdef class Request(Call):
    cdef public object form, arrays, count, counters, shared, backward, origin, name
    cdef public bint examples, is_attached, is_late

    cpdef bint answer(self, object task, object value) except -1
    cpdef fail(self)
    cpdef part(self, object start, object rows)
    cpdef result(self)
