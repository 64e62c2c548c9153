import cython

from weft.batching.attributes cimport OpCall, OpDispatcher, ResourceSpec
from weft.batching.batch_arrays cimport tensors as check_tensors
from weft.batching.ids cimport is_empty, new as new_id
from weft.batching.rendezvous cimport Fetch, Gather, PieceTable
from weft.core.scope cimport Scope, current


cdef class BatchCall(OpCall):
    cdef public object library, id, nodes
    cdef public bint is_recorded


cdef class OwnerCall(Gather):
    pass


@cython.locals(table=PieceTable)
cdef PieceTable _piece_table(ResourceSpec spec, object key, Scope scope)
cdef _deliver(ResourceSpec spec, Scope scope, double now, object data, object library, object index, object own)
cdef OpDispatcher _dispatcher(ResourceSpec spec, Scope scope, list tensors, object library, long rows)
@cython.locals(dispatcher=OpDispatcher, call=BatchCall, tensors=list, rows=long, now=double, scope=Scope)
cdef _batch(ResourceSpec spec, tuple attributes, object in_tensors)
@cython.locals(fetch=Fetch, now=double, scope=Scope)
cdef _unbatch(ResourceSpec spec, tuple attributes, object batched_tensor, object batch_index, object id)
