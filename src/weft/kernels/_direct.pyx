# The functions of `direct.py`: arrays become pointers, and those go to the C functions of `entries.py`.
#
# Other threads and hooks can change an array whenever Python code runs. So everything a kernel needs is made first, then
# arrays are looked at, and from there to the kernel's end no Python code runs. A kernel on more than LOCKED bytes lets go of
# the interpreter lock: if there are other threads, its large arrays are held in their places (see `_memory.py`), and its
# vectors are copies.

import sys

cimport cython
cimport numpy as np
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.contextvars cimport get_value
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from . import buffers, choice
from .. import _memory as memory

np.import_array()

cdef enum:
    MOST = 8  # dimensions
    SLOTS = 64
    LOCKED = 1 << 16  # bytes of a result up to which the interpreter lock is kept: some microseconds

ctypedef enum Kind:
    OTHER = -1
    FLOAT32
    FLOAT64
    FLOAT16
    BFLOAT16

ctypedef enum Pass:
    FORWARD
    INFERENCE
    BACKWARD

cdef int[4] _SIZES = [4, 8, 2, 2]
cdef int[4] _NUMBERS = [np.NPY_FLOAT32, np.NPY_FLOAT64, np.NPY_FLOAT16, np.NPY_INT16]  # of dtypes in NumPy
cdef list _DTYPES = ["float32", "float64", "float16", "bfloat16"]
cdef list _PASSES = ["forward", "inference", "backward"]

ctypedef int64_t (*Over)(
    void* x, void* y, void* scale, void* offset, void* mean, void* variance, double epsilon,
    void* numbers, void* spans, void* groups, void* counts, void* board, int64_t length, int64_t helpers,
) noexcept nogil
ctypedef int64_t (*Back)(
    void* g, void* x, void* y, void* scale, void* variance, void* mean, void* scale_grad, void* offset_grad, double epsilon,
    void* numbers, void* spans, void* groups, void* counts, void* board, int64_t length, int64_t helpers,
) noexcept nogil


# ---- torch: what DLPack's interface in C says of a tensor

cdef extern from *:
    """
    typedef struct {
        void* data; int32_t device_type; int32_t device_id; int32_t ndim; uint8_t code; uint8_t bits; uint16_t lanes;
        int64_t* shape; int64_t* strides; uint64_t byte_offset;
    } weft_dl_tensor;
    typedef struct {
        uint32_t major; uint32_t minor; void* previous; void* allocate; void* give; void* take;
        int (*look)(void*, weft_dl_tensor*); void* stream;
    } weft_dl_exchange;
    """
    ctypedef struct weft_dl_tensor:
        void* data
        int32_t device_type
        int32_t ndim
        uint8_t code
        uint8_t bits
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct weft_dl_exchange:
        uint32_t major
        int (*look)(void*, weft_dl_tensor*) except -1

cdef weft_dl_exchange* _exchange = NULL
cdef object _tensor = None, _parameter = None, _from_numpy = None, _is_neg = None, _bfloat16 = None
cdef object _int16 = None, _storage = None, _data_ptr = None, _nbytes = None


cdef bint _meet_torch() except -1:
    """Whether there is a torch that has the interface: since 2.10."""
    global _exchange, _tensor, _parameter, _from_numpy, _is_neg, _bfloat16, _int16, _storage
    global _data_ptr, _nbytes
    torch = sys.modules.get("torch")
    if not hasattr(torch, "nn") or not hasattr(torch.nn, "Parameter"):  # another thread is importing it
        return False
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        _exchange = <weft_dl_exchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        if _exchange.major != 1:
            _exchange = NULL
    _parameter, _from_numpy, _is_neg, _bfloat16 = torch.nn.Parameter, torch.from_numpy, torch.Tensor.is_neg, torch.bfloat16
    _int16, _storage = torch.int16, torch.Tensor.untyped_storage
    _data_ptr, _nbytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
    _tensor = torch.Tensor
    return True


# ---- arrays

cdef struct View:
    char* data
    Kind kind
    bint is_torch
    int ndim
    int64_t[MOST] shape
    int64_t[MOST] strides  # in elements


cdef bint _look(object x, View* view) except -1:
    """Whether `x` is an array that can be described so."""
    if type(x) is np.ndarray:
        return _look_at_array(x, view)
    return (_tensor is not None or _meet_torch()) and _look_at_tensor(x, view)


cdef bint _look_at_array(np.ndarray x, View* view) except -1:
    cdef int i
    view.kind, view.ndim, view.is_torch, view.data = _kind_of(x), np.PyArray_NDIM(x), False, np.PyArray_BYTES(x)
    if view.kind == OTHER or view.ndim > MOST or not np.PyArray_ISBEHAVED_RO(x):
        return False
    for i in range(view.ndim):
        view.shape[i] = np.PyArray_DIM(x, i)
        view.strides[i] = np.PyArray_STRIDE(x, i) // _SIZES[<int>view.kind]
    return True


cdef bint _look_at_tensor(object x, View* view) except -1:
    cdef weft_dl_tensor tensor
    cdef int i
    if _exchange is NULL or not (type(x) is _tensor or type(x) is _parameter):
        return False
    try:
        _exchange.look(<void*>x, &tensor)
    except RuntimeError:  # it has no memory of its own: a wrapper of `torch.func`, a sparse tensor
        return False
    if tensor.data is NULL or tensor.device_type != 1 or tensor.ndim > MOST or _is_neg(x):
        return False
    view.kind = OTHER
    if tensor.bits == 32:
        view.kind = FLOAT32 if tensor.code == 2 else OTHER
    elif tensor.bits == 64:
        view.kind = FLOAT64 if tensor.code == 2 else OTHER
    elif tensor.bits == 16:
        view.kind = FLOAT16 if tensor.code == 2 else BFLOAT16 if tensor.code == 4 else OTHER
    view.ndim, view.is_torch, view.data = tensor.ndim, True, <char*>tensor.data + tensor.byte_offset
    for i in range(view.ndim):
        view.shape[i], view.strides[i] = tensor.shape[i], tensor.strides[i]
    return view.kind != OTHER


cdef bint _is_stored(object x, size_t place, int64_t size) except -1:
    """Whether the storage of `x`, if that is a tensor, has `size` bytes from `place` on: it may have been resized."""
    if type(x) is np.ndarray:
        return True
    storage = _storage(x)
    cdef size_t start = _data_ptr(storage)
    return place >= start and place - start + size <= <size_t>_nbytes(storage)


cdef int _bfloat16_number = -1  # of the dtype that ml_dtypes adds to NumPy


cdef Kind _kind_of(np.ndarray array) except *:
    global _bfloat16_number
    cdef int number = np.PyArray_TYPE(array)
    if number == np.NPY_FLOAT32:
        return FLOAT32
    if number == np.NPY_FLOAT64:
        return FLOAT64
    if number == np.NPY_FLOAT16:
        return FLOAT16
    if _bfloat16_number < 0 and "ml_dtypes" in sys.modules:
        _bfloat16_number = np.dtype(sys.modules["ml_dtypes"].bfloat16).num
    return BFLOAT16 if number == _bfloat16_number else OTHER


cdef bint _in_one_piece(View* view, int last) noexcept:
    """Whether the elements follow each other in memory, with axis `last`, or none (-1), counted as the last one."""
    cdef int64_t step = 1
    cdef int i
    if last >= 0:
        if view.shape[last] != 1 and view.strides[last] != 1:
            return False
        step = view.shape[last]
    for i in range(view.ndim - 1, -1, -1):
        if i != last:
            if view.shape[i] != 1 and view.strides[i] != step:
                return False
            step *= view.shape[i]
    return True


# ---- what the shape of a call decides, kept for the next one

cdef class Form:
    cdef int64_t[MOST] shape
    cdef np.npy_intp[MOST] strides  # of a result, in bytes
    cdef int ndim, axis, number  # of the result's dtype in NumPy
    cdef Kind kind, vector_kind
    cdef Pass pass_
    cdef bint is_torch, is_moved
    cdef int64_t channels, elements, bytes  # elements of a channel
    cdef object maker, plan, threads, entry
    cdef void *vectors[4]
    cdef void* address


cdef list _forms = [None] * SLOTS
cdef object _cpu = None, _forced = choice.FORCED


cdef Form _form_of(View* x, int axis, Pass pass_):
    """The form of a call on `x`; None where it cannot go this way, or is to use kernels of a certain kind."""
    cdef uint64_t place = <uint64_t>(x.kind * 8 + pass_ * 2 + x.is_torch) * 31 + axis
    cdef bint is_moved = not _in_one_piece(x, -1)
    cdef Form form
    cdef int i
    if _cpu is False or not 0 <= axis < x.ndim or (is_moved and not _in_one_piece(x, axis)):
        return None
    if get_value(_forced) is not None:
        return None
    for i in range(x.ndim):
        place = place * 1000003 + <uint64_t>x.shape[i]
    place = (place ^ (place >> 17)) % SLOTS
    form = _forms[place]
    if form is None or not _is_of(form, x, axis, pass_, is_moved):
        form = _forms[place] = _new_form(x, axis, pass_, is_moved)
    return form if form.elements > 0 else None


cdef bint _is_of(Form form, View* x, int axis, Pass pass_, bint is_moved) except -1:
    cdef int i
    if (
        form.kind != x.kind or form.ndim != x.ndim or form.axis != axis or form.pass_ != pass_
        or form.is_torch != x.is_torch or form.is_moved != is_moved
    ):
        return False
    for i in range(x.ndim):
        if form.shape[i] != x.shape[i]:
            return False
    return form.maker is _cpu._form


cdef Form _new_form(View* x, int axis, Pass pass_, bint is_moved):
    global _cpu
    cdef Form form = Form.__new__(Form)
    cdef int i, size = _SIZES[<int>x.kind]
    cdef int64_t step = size
    try:
        from . import cpu as _cpu
    except ImportError:  # there is no Numba
        _cpu = False
        return form  # without elements to work on
    shape = tuple([x.shape[i] for i in range(x.ndim)])
    element = 2 * size if pass_ == BACKWARD else size
    form.maker = _cpu._form
    form.channels, form.elements, form.threads, form.plan = form.maker(
        shape, axis, is_moved, element, pass_ == INFERENCE, None
    )
    form.ndim, form.axis, form.kind, form.pass_, form.is_torch, form.is_moved = (
        x.ndim, axis, x.kind, pass_, x.is_torch, is_moved
    )
    form.vector_kind = FLOAT64 if x.kind == FLOAT64 else FLOAT32
    form.number = np.NPY_INT16 if x.kind == BFLOAT16 else _NUMBERS[<int>x.kind]
    if x.kind == BFLOAT16 and not x.is_torch:
        form.number = _bfloat16_number
    order = [*range(axis), *range(axis + 1, x.ndim), axis] if is_moved else [*range(x.ndim)]
    for i in reversed(order):
        form.strides[i] = step
        step *= max(x.shape[i], 1)
    form.bytes = step
    for i in range(x.ndim):
        form.shape[i] = x.shape[i]
    if form.elements > 0:
        for i in range(4):
            form.vectors[i] = np.PyArray_DATA(form.plan.vectors[i])
        form.entry = _cpu.entry_of(_PASSES[<int>pass_], _DTYPES[<int>x.kind])
        form.address = <void*><size_t>form.entry.address
    return form


# ---- results

@cython.no_gc
@cython.final
cdef class Loan:
    """Memory of `buffers`, which has it back when the last array on it goes."""
    cdef object memory
    cdef Py_buffer place

    def __cinit__(self, size):
        memory = buffers.take(size)
        PyObject_GetBuffer(memory, &self.place, PyBUF_WRITABLE)
        self.memory = memory

    def __dealloc__(self):
        if self.memory is not None:
            PyBuffer_Release(&self.place)
            buffers.give(self.memory)


cdef np.ndarray _result(Form form):
    """Room for a result that lies in memory as the input does."""
    cdef np.npy_intp* shape = <np.npy_intp*>form.shape
    cdef np.ndarray found
    cdef Loan loan
    if form.bytes < <int64_t>buffers.LARGE:
        return np.PyArray_New(np.ndarray, form.ndim, shape, form.number, form.strides, NULL, 0, 0, None)
    loan = Loan(form.bytes)
    found = np.PyArray_New(
        np.ndarray, form.ndim, shape, form.number, form.strides, loan.place.buf, 0, np.NPY_ARRAY_BEHAVED, None
    )
    np.set_array_base(found, loan)
    return found


cdef np.ndarray _vector(Form form):
    """Room for a per-channel result."""
    cdef np.npy_intp count = form.channels
    return np.PyArray_EMPTY(1, &count, _NUMBERS[<int>form.vector_kind], 0)


cdef _given(Form form, np.ndarray array):
    """A result in the library and dtype of the input."""
    if not form.is_torch:
        return array
    found = _from_numpy(array)
    return found.view(_bfloat16) if form.kind == BFLOAT16 and np.PyArray_TYPE(array) == np.NPY_INT16 else found


# ---- memory that stays

cdef bint _is_still(object x, View* view, Form form) except -1:
    """Whether `x`, which lies in one piece, is what and where it was when it was looked at, and all of it is there."""
    cdef View now
    cdef int i
    if not _look(x, &now) or now.data != view.data or now.kind != view.kind or now.ndim != view.ndim:
        return False
    for i in range(now.ndim):
        if now.shape[i] != view.shape[i] or now.strides[i] != view.strides[i]:
            return False
    return _is_stored(x, <size_t>now.data, form.bytes)


cdef extern from "Python.h":
    ctypedef struct PyThreadState:
        pass
    ctypedef struct PyInterpreterState:
        pass
    PyThreadState* PyThreadState_Get()
    PyThreadState* PyThreadState_Next(PyThreadState*)
    PyInterpreterState* PyInterpreterState_Get()
    PyThreadState* PyInterpreterState_ThreadHead(PyInterpreterState*)


cdef bint _is_alone() noexcept:
    """Whether no other thread can run Python code."""
    cdef PyThreadState* here = PyThreadState_Get()
    return PyInterpreterState_ThreadHead(PyInterpreterState_Get()) == here and PyThreadState_Next(here) is NULL


cdef list _kept(Form form, tuple arrays):
    """What holds `arrays` in their places while other threads run; None where none can run before the kernel's end."""
    cdef list held = []
    if form.bytes <= LOCKED or _is_alone():
        return None
    for x in arrays:
        if type(x) is np.ndarray:
            held.append(memory.hold(x))
        else:
            x = x.detach()
            held.append((x.view(_int16) if form.kind == BFLOAT16 else x).numpy())
    return held


cdef bint _is_whole(object v, View* view) except -1:
    """Whether all of a vector is in its storage."""
    return _is_stored(v, <size_t>view.data, view.shape[0] * _SIZES[<int>view.kind])


cdef bint _take(object v, View* view, Form form, list held) except -1:
    """Whether `v` is a vector for the kernel; `view` is then that of the memory the kernel is to read."""
    cdef np.ndarray copy = None if held is None else _vector(form)
    if not (_is_vector(v, view, form) and _is_whole(v, view)):
        return False
    if copy is not None:
        memcpy(np.PyArray_DATA(copy), view.data, np.PyArray_NBYTES(copy))
        view.data = np.PyArray_BYTES(copy)
        held.append(copy)
    return True


# ---- the functions

cdef bint _is_vector(object v, View* view, Form form) except -1:
    """Whether `v` has one number for each channel, in the dtype that the drivers want."""
    return (
        _look(v, view) and view.ndim == 1 and view.shape[0] == form.channels and view.is_torch == form.is_torch
        and view.kind == form.vector_kind and _in_one_piece(view, -1)
    )


def elements(x, axis, vectors):
    cdef View view
    cdef Form form
    if not _look(x, &view):
        return 0
    form = _form_of(&view, axis, FORWARD)
    if form is None:
        return 0
    for v in vectors:
        if not _is_vector(v, &view, form):
            return 0
    return form.elements


def blend(tuple running, tuple used, double keep, double share, double corrected):
    cdef View mean, variance, new_mean, new_variance
    cdef weft_dl_tensor batches
    if not (
        _look(used[0], &new_mean) and new_mean.ndim == 1 and _in_one_piece(&new_mean, -1) and _is_whole(used[0], &new_mean)
        and _is_like(running[0], &mean, &new_mean) and _is_like(running[1], &variance, &new_mean)
        and _is_like(used[1], &new_variance, &new_mean) and _is_number(running[2], &batches)
    ):
        return False
    _blend(&mean, &new_mean, keep, share)
    _blend(&variance, &new_variance, keep, corrected)
    (<int64_t*>(<char*>batches.data + batches.byte_offset))[0] += 1
    return True


cdef bint _is_like(object v, View* view, View* other) except -1:
    """Whether `v` is a vector of the length and dtype of another."""
    return (
        _look(v, view) and view.ndim == 1 and view.shape[0] == other.shape[0] and view.kind == other.kind
        and view.is_torch == other.is_torch and _in_one_piece(view, -1) and _is_whole(v, view)
    )


cdef bint _is_number(object x, weft_dl_tensor* tensor) except -1:
    """Whether `x` is a tensor of one int64 in host memory."""
    cdef int i
    if type(x) is not _tensor:
        return False
    try:
        _exchange.look(<void*>x, tensor)
    except RuntimeError:
        return False
    if tensor.data is NULL or tensor.device_type != 1 or tensor.code != 0 or tensor.bits != 64:
        return False
    for i in range(tensor.ndim):
        if tensor.shape[i] != 1:
            return False
    return _is_stored(x, <size_t>tensor.data + tensor.byte_offset, 8)


cdef void _blend(View* old, View* new, double keep, double part) noexcept:
    cdef Py_ssize_t i
    if old.kind == FLOAT32:
        for i in range(old.shape[0]):
            (<float*>old.data)[i] = <float>(keep * (<float*>old.data)[i] + part * (<float*>new.data)[i])
    else:
        for i in range(old.shape[0]):
            (<double*>old.data)[i] = keep * (<double*>old.data)[i] + part * (<double*>new.data)[i]


def forward(x, scale, offset, double epsilon, int axis):
    cdef View data, a, b
    cdef Form form
    cdef np.ndarray y, mean, variance, board
    cdef int64_t helpers
    cdef list held
    if not _look(x, &data):
        return None
    form = _form_of(&data, axis, FORWARD)
    if form is None:
        return None
    y, mean, variance = _result(form), _vector(form), _vector(form)
    board, helpers = _cpu.workers(form.threads, form.is_torch)
    held = _kept(form, (x,))
    if not (_take(scale, &a, form, held) and _take(offset, &b, form, held) and _is_still(x, &data, form)):
        return None
    _over(
        form, data.data, np.PyArray_DATA(y), a.data, b.data, np.PyArray_DATA(mean), np.PyArray_DATA(variance), epsilon,
        board, helpers,
    )
    return _given(form, y), _given(form, mean), _given(form, variance)


def fused(x, scale, offset, mean, variance, double epsilon, int axis, bint is_training):
    cdef np.ndarray used_mean, used_variance
    cdef Py_ssize_t count
    if not is_training:
        mean, variance = _copy(mean), _copy(variance)
        if mean is None or variance is None:
            return None
        y = inference(x, scale, offset, mean, variance, epsilon, axis)
        return None if y is None else (y, _times(mean, 1), _times(variance, 1), mean, variance)
    if not (_is_statistic(mean, x) and _is_statistic(variance, x)):  # they are not used, and may have any length
        return None
    found = forward(x, scale, offset, epsilon, axis)
    if found is None:
        return None
    y, used_mean, used_variance = found
    count = np.PyArray_SIZE(y) // np.PyArray_SIZE(used_mean)
    return y, _times(used_mean, 1), _times(used_variance, count / <double>max(count - 1, 1)), used_mean, used_variance


cdef bint _is_statistic(v, np.ndarray x):
    """Whether `v` is an array of one axis in the dtype that statistics have beside `x`."""
    return type(v) is np.ndarray and np.PyArray_NDIM(v) == 1 and np.PyArray_ISNOTSWAPPED(v) and (
        np.PyArray_TYPE(v) == (np.NPY_FLOAT64 if np.PyArray_TYPE(x) == np.NPY_FLOAT64 else np.NPY_FLOAT32)
    )


cdef np.ndarray _copy(v):
    """A vector of NumPy's in memory of its own; None for anything else."""
    cdef View view
    if type(v) is not np.ndarray or not _look_at_array(v, &view) or view.ndim != 1 or not _in_one_piece(&view, -1):
        return None
    return np.PyArray_NewCopy(v, np.NPY_CORDER)


cdef np.ndarray _times(np.ndarray v, double factor):
    """A vector times a number that is first rounded to its dtype."""
    cdef np.npy_intp i, count = np.PyArray_SIZE(v)
    cdef np.ndarray found = np.PyArray_EMPTY(1, &count, np.PyArray_TYPE(v), 0)
    if np.PyArray_TYPE(v) == np.NPY_FLOAT64:
        for i in range(count):
            (<double*>np.PyArray_DATA(found))[i] = factor * (<double*>np.PyArray_DATA(v))[i]
    else:
        for i in range(count):
            (<float*>np.PyArray_DATA(found))[i] = <float>factor * (<float*>np.PyArray_DATA(v))[i]
    return found


def inference(x, scale, offset, mean, variance, double epsilon, int axis):
    cdef View data, a, b, m, v
    cdef Form form
    cdef np.ndarray y, board
    cdef int64_t helpers
    cdef list held
    if not _look(x, &data):
        return None
    form = _form_of(&data, axis, INFERENCE)
    if form is None:
        return None
    y = _result(form)
    board, helpers = _cpu.workers(form.threads, form.is_torch)
    held = _kept(form, (x,))
    if not (
        _take(scale, &a, form, held) and _take(offset, &b, form, held) and _take(mean, &m, form, held)
        and _take(variance, &v, form, held) and _is_still(x, &data, form)
    ):
        return None
    _over(form, data.data, np.PyArray_DATA(y), a.data, b.data, m.data, v.data, epsilon, board, helpers)
    return _given(form, y)


cdef int _over(
    Form form, void* x, void* y, void* scale, void* offset, void* mean, void* variance, double epsilon,
    np.ndarray board, int64_t helpers,
) except -1:
    cdef int64_t done
    cdef void** plan = form.vectors
    if form.bytes <= LOCKED:
        done = (<Over>form.address)(
            x, y, scale, offset, mean, variance, epsilon, plan[0], plan[1], plan[2], plan[3],
            np.PyArray_DATA(board), np.PyArray_DIM(board, 0), helpers,
        )
    else:
        with nogil:
            done = (<Over>form.address)(
                x, y, scale, offset, mean, variance, epsilon, plan[0], plan[1], plan[2], plan[3],
                np.PyArray_DATA(board), np.PyArray_DIM(board, 0), helpers,
            )
    if not done:
        raise MemoryError("there is no room for the sums of a batch norm")
    return 0


def backward(g, x, scale, mean, variance, double epsilon, int axis):
    cdef View data, other, s, m, v
    cdef Form form
    cdef np.ndarray y, scale_grad, offset_grad, board
    cdef int64_t helpers, done
    cdef void** plan
    cdef list held
    if not (_look(x, &data) and _look(g, &other)):
        return None
    form = _form_of(&data, axis, BACKWARD)
    if form is None or not (
        _is_of(form, &other, axis, BACKWARD, form.is_moved) and _in_one_piece(&other, axis if form.is_moved else -1)
    ):
        return None
    y, scale_grad, offset_grad = _result(form), _vector(form), _vector(form)
    board, helpers = _cpu.workers(form.threads, form.is_torch)
    plan = form.vectors
    held = _kept(form, (g, x))
    if not (
        _take(scale, &s, form, held) and _take(mean, &m, form, held) and _take(variance, &v, form, held)
        and _is_still(g, &other, form) and _is_still(x, &data, form)
    ):
        return None
    if form.bytes <= LOCKED:
        done = (<Back>form.address)(
            other.data, data.data, np.PyArray_DATA(y), s.data, v.data, m.data, np.PyArray_DATA(scale_grad),
            np.PyArray_DATA(offset_grad), epsilon, plan[0], plan[1], plan[2], plan[3],
            np.PyArray_DATA(board), np.PyArray_DIM(board, 0), helpers,
        )
    else:
        with nogil:
            done = (<Back>form.address)(
                other.data, data.data, np.PyArray_DATA(y), s.data, v.data, m.data, np.PyArray_DATA(scale_grad),
                np.PyArray_DATA(offset_grad), epsilon, plan[0], plan[1], plan[2], plan[3],
                np.PyArray_DATA(board), np.PyArray_DIM(board, 0), helpers,
            )
    if not done:
        raise MemoryError("there is no room for the sums of a batch norm")
    return _given(form, y), _given(form, scale_grad), _given(form, offset_grad)
