import cython

from weft.batching.dispatcher cimport QueuedCall, Dispatcher
from weft.batching.rendezvous cimport Fetch, Gather, PieceTable
from weft.core.scope cimport Scope, current
from weft.batching.ids cimport is_empty, new as new_id
from weft.batching.attributes cimport Plan, Queue, enter, tensors as the_tensors


cdef class _Join(QueuedCall):
    cdef public object library, lane, id, nodes
    cdef public bint is_recorded



cdef class _Owner(Gather):
    pass


cdef PieceTable _meeting(Plan plan, object key, Scope scope)
cdef _deliver(Plan plan, Scope scope, double now, object data, object library, object index, object own)
cdef Queue _queue(Plan plan, Scope scope, list tensors, object library, long rows)
@cython.locals(queue=Queue, call=_Join, tensors=list, rows=long, now=double, scope=Scope)
cdef _batch(Plan plan, tuple attributes, object in_tensors)
@cython.locals(meeting=PieceTable, now=double, scope=Scope)
cdef _unbatch(Plan plan, tuple attributes, object batched_tensor, object batch_index, object id)
