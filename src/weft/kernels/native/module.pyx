# The border between Python and the C++ kernels: arrays of NumPy and tensors of torch become pointers, results become arrays.
#
# Other threads and hooks can change an array whenever Python code runs. So results and packed copies are made first. Then the
# inputs are looked at, and no Python code runs from there to the kernel's end. A kernel on more than LOCKED bytes releases the
# GIL; if there are other threads, its inputs are held in their places (see core/memory.py). Vectors are always copied.

import os
import sys

cimport cython
cimport numpy as np
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

import numpy

from weft.core.arrays import dtype_of, library_of, tensor_memory
from weft.core.memory import hold
from weft.errors import FailedPreconditionError, InvalidArgumentError
from weft.kernels import PROCESS, buffers
from weft.kernels.choice import FORCED

np.import_array()

cdef enum:
    MOST = 8  # dimensions
    LOCKED = 1 << 16  # bytes of a result up to which the GIL is kept: some microseconds

cdef extern from "call.h" namespace "weft" nogil:
    ctypedef enum Dtype:
        FLOAT32
        FLOAT64
        FLOAT16
        BFLOAT16
        DTYPES
    ctypedef enum Pass:
        FORWARD
        INFERENCE
        GRAD
        INFERENCE_GRAD
        GRAD_GRAD
        INFERENCE_GRAD_GRAD
    ctypedef struct Arity:
        int inputs, outputs, vectors, made
    const Arity* ARITY
    ctypedef struct Shape:
        int64_t rows, channels, depth
    ctypedef struct Call:
        Pass pass_ "pass"
        Dtype dtype
        Shape shape
        double epsilon
        int64_t torch_threads
        const void* inputs[3]
        void* outputs[2]
        const void* vectors[5]
        void* made[2]
        const uint8_t* mask
        int64_t mask_rows
    bool_t run(const Call&)
    const char* instruction_set()
    vector[const char*] instruction_sets()
    bool_t force_instruction_set(const char*)

cdef extern from "team.h" namespace "weft" nogil:
    int64_t _num_threads "weft::num_threads"()
    void _set_num_threads "weft::set_num_threads"(int64_t)
    void set_torch_runner(void*)

cdef int[4] _SIZES = [4, 8, 2, 2]
cdef int[4] _NUMBERS = [np.NPY_FLOAT32, np.NPY_FLOAT64, np.NPY_FLOAT16, np.NPY_INT16]  # of dtypes in NumPy
cdef dict _KINDS = {"float32": FLOAT32, "float64": FLOAT64, "float16": FLOAT16, "bfloat16": BFLOAT16}


# ---- torch: DLPack's interface in C

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
cdef object _int16 = None, _storage = None, _data_ptr = None, _nbytes = None, _threads_of_torch = None


cdef bint _meet_torch() except -1:
    """True if torch is imported. Its tensors are read by its exchange table, which it has since 2.10."""
    global _exchange, _tensor, _parameter, _from_numpy, _is_neg, _bfloat16, _int16, _storage
    global _data_ptr, _nbytes, _threads_of_torch
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
    _threads_of_torch = torch.get_num_threads
    if os.getpid() == PROCESS:  # OpenMP's threads stay behind in a fork, and a call for them would never return
        import ctypes

        try:
            parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
            set_torch_runner(<void*><size_t>ctypes.cast(parallel, ctypes.c_void_p).value)
        except (OSError, AttributeError):
            pass
    _tensor = torch.Tensor
    return True


# ---- arrays

cdef struct View:
    char* data
    Dtype kind  # DTYPES for any other
    bint is_torch
    int ndim
    int64_t[MOST] shape
    int64_t[MOST] strides  # in elements


cdef bint _look(object x, View* view) except -1:
    """Describe `x`; False if its memory cannot be read as it is."""
    if type(x) is np.ndarray:
        return _look_at_array(x, view)
    return (_tensor is not None or _meet_torch()) and _look_at_tensor(x, view)


cdef bint _look_at_array(np.ndarray x, View* view) except -1:
    cdef int i
    view.kind, view.ndim, view.is_torch, view.data = _kind_of(x), np.PyArray_NDIM(x), False, np.PyArray_BYTES(x)
    if view.kind == DTYPES or view.ndim > MOST or not np.PyArray_ISBEHAVED_RO(x):
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
    view.kind = DTYPES
    if tensor.bits == 32:
        view.kind = FLOAT32 if tensor.code == 2 else DTYPES
    elif tensor.bits == 64:
        view.kind = FLOAT64 if tensor.code == 2 else DTYPES
    elif tensor.bits == 16:
        view.kind = FLOAT16 if tensor.code == 2 else BFLOAT16 if tensor.code == 4 else DTYPES
    view.ndim, view.is_torch, view.data = tensor.ndim, True, <char*>tensor.data + tensor.byte_offset
    for i in range(view.ndim):
        view.shape[i], view.strides[i] = tensor.shape[i], tensor.strides[i]
    return view.kind != DTYPES


cdef int _bfloat16_number = -1  # of the dtype that ml_dtypes adds to NumPy


cdef Dtype _kind_of(np.ndarray array) except *:
    global _bfloat16_number
    cdef int number = np.PyArray_TYPE(array)
    if number == np.NPY_FLOAT32:
        return FLOAT32
    if number == np.NPY_FLOAT64:
        return FLOAT64
    if number == np.NPY_FLOAT16:
        return FLOAT16
    if _bfloat16_number < 0 and "ml_dtypes" in sys.modules:
        _bfloat16_number = numpy.dtype(sys.modules["ml_dtypes"].bfloat16).num
    return BFLOAT16 if number == _bfloat16_number else DTYPES


cdef bint _in_one_piece(View* view, int last) noexcept:
    """True if the elements follow each other in memory, with axis `last`, or none (-1), taken as the last one."""
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


cdef bint _is_stored(object x, View* view, int64_t elements) except -1:
    """True if the storage of a tensor has so many elements from its first one on: it may have been resized."""
    if not view.is_torch or elements == 0:
        return True
    storage = _storage(x)
    cdef size_t start = _data_ptr(storage), place = <size_t>view.data
    return place >= start and place - start + elements * _SIZES[<int>view.kind] <= <size_t>_nbytes(storage)


cdef object _readable(object x):
    """`x` as an array that `_look` can describe, a copy if need be."""
    if type(x) is not np.ndarray and library_of(x) == "torch":
        x = x.detach().resolve_neg()
        if _look(x, &_unused):
            return x
        is_bfloat = dtype_of(x) == "bfloat16"
        x = tensor_memory(x.view(_int16) if is_bfloat else x)
        return x.view(_numpy_bfloat16()) if is_bfloat else x
    x = numpy.asarray(x)
    return x if x.flags.aligned and x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))

cdef View _unused


cdef object _numpy_bfloat16():
    import ml_dtypes

    return ml_dtypes.bfloat16


cdef object _packed(object x, int last):
    """A copy of `x` in one piece, with axis `last`, or none (-1), moved to the end."""
    if type(x) is np.ndarray:
        return numpy.ascontiguousarray(x if last < 0 else numpy.moveaxis(x, last, -1))
    return (x.detach() if last < 0 else x.detach().movedim(last, -1)).contiguous()


# ---- results

@cython.no_gc
@cython.final
cdef class Loan:
    """Memory of `buffers`, returned when the last array on it is deleted."""
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


cdef np.ndarray _result(View* x, int last, int64_t bytes, bint is_masked):
    """Room for a result that lies in memory as `x` does; zeros if some rows do not count."""
    cdef np.npy_intp[MOST] shape, strides
    cdef np.npy_intp step = _SIZES[<int>x.kind]
    cdef np.ndarray found
    cdef Loan loan
    cdef int i, number = _NUMBERS[<int>x.kind]
    if x.kind == BFLOAT16 and not x.is_torch:
        number = _bfloat16_number
    if last >= 0:
        strides[last] = step
        step *= x.shape[last]
    for i in range(x.ndim - 1, -1, -1):
        shape[i] = x.shape[i]
        if i != last:
            strides[i] = step
            step *= x.shape[i]
    if bytes < <int64_t>buffers.LARGE:
        found = np.PyArray_New(np.ndarray, x.ndim, shape, number, strides, NULL, 0, 0, None)
    else:
        loan = Loan(bytes)
        found = np.PyArray_New(np.ndarray, x.ndim, shape, number, strides, loan.place.buf, 0, np.NPY_ARRAY_BEHAVED, None)
        np.set_array_base(found, loan)
    if is_masked:
        memset(np.PyArray_DATA(found), 0, bytes)
    return found


cdef np.ndarray _vector(int64_t channels, Dtype kind):
    """Room for a per-channel result."""
    cdef np.npy_intp count = channels
    return np.PyArray_EMPTY(1, &count, np.NPY_FLOAT64 if kind == FLOAT64 else np.NPY_FLOAT32, 0)


cdef _given(np.ndarray array, Dtype kind, object library):
    """A result in the library of the input."""
    if library == "numpy":
        return array
    if library == "jax":
        return sys.modules["jax"].numpy.asarray(array)
    if kind == BFLOAT16:
        return _from_numpy(array if np.PyArray_TYPE(array) == np.NPY_INT16 else array.view(numpy.int16)).view(_bfloat16)
    return _from_numpy(array)


# ---- memory that stays

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
    """True if no other thread can run Python code."""
    cdef PyThreadState* here = PyThreadState_Get()
    return PyInterpreterState_ThreadHead(PyInterpreterState_Get()) == here and PyThreadState_Next(here) is NULL


cdef object _held(object x):
    """An object that keeps the memory of `x` in its place."""
    if type(x) is np.ndarray:
        return hold(x)
    x = x.detach()
    return (x.view(_int16) if x.dtype is _bfloat16 else x).numpy()


cdef bint _is_same(View* a, View* b) noexcept:
    """True if two arrays have the same dtype, shape and layout."""
    cdef int i
    if a.kind != b.kind or a.ndim != b.ndim:
        return False
    for i in range(a.ndim):
        if a.shape[i] != b.shape[i] or (a.strides[i] != b.strides[i] and a.shape[i] != 1):
            return False
    return True


# ---- a call

cdef object _misfit(what, shape, got):
    return InvalidArgumentError(f"{what} of batch norm must have the shape {list(shape)}, got {list(got)}")


cdef tuple _shape(View* view):
    cdef int i
    return tuple([view.shape[i] for i in range(view.ndim)])


cdef object _prepared(object x, View* view, View* like, int* last):
    """`x`, or a copy of it, in one piece, with its description. The first array's layout decides (`last`); others follow it."""
    cdef int i
    if not _look(x, view):
        x = _readable(x)
        if not _look(x, view):
            raise InvalidArgumentError(f"batch norm takes floating point arrays of up to {MOST} axes, got {dtype_of(x)}")
    if like is NULL:
        i = last[0]
        if not 0 <= i < view.ndim:
            raise InvalidArgumentError(f"x of batch norm must have an axis {i}, got the shape {list(_shape(view))}")
        if _in_one_piece(view, -1):
            last[0] = -1
        elif not _in_one_piece(view, i):
            last[0] = -1
            x = _packed(x, -1)
            _look(x, view)
        return x
    if view.kind != like.kind:
        raise InvalidArgumentError(f"a gradient of batch norm must be {_NAMES[<int>like.kind]}, as x is, got {dtype_of(x)}")
    if _shape(view) != _shape(like):
        raise _misfit("a gradient", _shape(like), _shape(view))
    if not _in_one_piece(view, last[0]):
        x = _packed(x, last[0])
        _look(x, view)
    return x

cdef list _NAMES = ["float32", "float64", "float16", "bfloat16"]


cdef bint _take_vector(object v, int64_t channels, Dtype kind, char* to) except -1:
    """Copy a vector; False if it is not one that can be copied as it is."""
    cdef View view
    cdef int64_t i
    if not _look(v, &view) or view.kind != kind or view.ndim != 1 or view.shape[0] != channels or view.strides[0] < 0:
        return False
    if not _is_stored(v, &view, (channels - 1) * view.strides[0] + 1):
        return False
    if view.strides[0] == 1:
        memcpy(to, view.data, channels * _SIZES[<int>kind])
    elif kind == FLOAT64:
        for i in range(channels):
            (<double*>to)[i] = (<double*>view.data)[i * view.strides[0]]
    else:
        for i in range(channels):
            (<float*>to)[i] = (<float*>view.data)[i * view.strides[0]]
    return True


cdef object _plain_vector(object v, int64_t channels, Dtype kind):
    """A vector in memory of its own, in the dtype of vectors."""
    v = _readable(v)
    if type(v) is not np.ndarray:
        v = tensor_memory(v)
    if v.shape != (channels,):
        raise _misfit("a vector", (channels,), v.shape)
    return numpy.array(v, numpy.float64 if kind == FLOAT64 else numpy.float32)


cdef object _flags(object mask, int64_t rows):
    """A copy of a mask, one byte for each row."""
    found = numpy.array(mask.detach().numpy() if library_of(mask) == "torch" else mask, numpy.bool).view(numpy.uint8)
    if found.shape != (rows,):
        raise _misfit("the mask", (rows,), found.shape)
    return found


cdef object _call(Pass pass_, tuple given, tuple vectors, double epsilon, int axis, mask):
    """The results of a pass on large arrays and vectors, None if no element counts."""
    cdef View[3] views
    cdef View now
    cdef Call call
    cdef vector[char] copies
    cdef const Arity* arity = &ARITY[<int>pass_]
    cdef int i, last = axis, main = 0 if arity.inputs == 1 else 1
    cdef int64_t elements = 1, bytes, length
    cdef Dtype kind
    cdef bint done
    cdef list arrays = list(given), results = [], made = [], held = None
    cdef np.ndarray flags = None

    library = "numpy" if type(given[main]) is np.ndarray else library_of(given[main]) or "numpy"
    arrays[main] = _prepared(given[main], &views[main], NULL, &last)
    for i in range(arity.inputs):
        if i != main:
            arrays[i] = _prepared(given[i], &views[i], &views[main], &last)
    kind = FLOAT64 if views[main].kind == FLOAT64 else FLOAT32

    call.shape.channels, call.shape.depth = views[main].shape[axis], 1
    for i in range(views[main].ndim):
        elements *= views[main].shape[i]
        if i > axis and last < 0:
            call.shape.depth *= views[main].shape[i]
    if mask is not None:
        if axis == 0:
            raise InvalidArgumentError("a mask is for rows, and axis 0 holds the channels here")
        flags = _flags(mask, views[main].shape[0])
    if elements == 0 or (flags is not None and not flags.any()):
        return None
    call.shape.rows = elements // (call.shape.channels * call.shape.depth)
    call.mask = NULL
    call.mask_rows = 0
    if flags is not None:
        call.mask = <uint8_t*>np.PyArray_DATA(flags)
        call.mask_rows = np.PyArray_SIZE(flags)
    bytes = elements * _SIZES[<int>views[main].kind]

    for i in range(arity.outputs):
        results.append(_result(&views[main], last, bytes, flags is not None))
        call.outputs[i] = np.PyArray_DATA(<np.ndarray>results[i])
    for i in range(arity.made):
        made.append(_vector(call.shape.channels, kind))
        call.made[i] = np.PyArray_DATA(<np.ndarray>made[i])
    call.pass_, call.dtype, call.epsilon, call.torch_threads = pass_, views[main].kind, epsilon, 0
    if views[main].is_torch and bytes > LOCKED:
        call.torch_threads = _threads_of_torch()
    if bytes > LOCKED and not _is_alone():
        held = [_held(x) for x in arrays]

    # From here on no Python code runs until the kernel has ended.
    length = call.shape.channels * _SIZES[<int>kind]
    copies.resize(arity.vectors * length)
    for i in range(arity.vectors):
        if not _take_vector(vectors[i], call.shape.channels, kind, copies.data() + i * length):
            return _call(pass_, given, _plain_vectors(vectors, call.shape.channels, kind), epsilon, axis, mask)
        call.vectors[i] = copies.data() + i * length
    for i in range(arity.inputs):
        if not (_look(arrays[i], &now) and _is_same(&now, &views[i]) and _is_stored(arrays[i], &now, elements)):
            raise _changed(arrays[i])
        call.inputs[i] = now.data
    if bytes <= LOCKED:
        done = run(call)
    else:
        with nogil:
            done = run(call)
    if not done:
        raise MemoryError("there is no room for the sums of a batch norm")
    return tuple(
        [_given(y, views[main].kind, library) for y in results] + [_given(v, kind, library) for v in made]
    )


cdef object _changed(object x):
    """The error of an array that changed during the call, or whose storage is too small."""
    if type(x) is not np.ndarray:
        x = x.detach()
        tensor_memory(x.view(_int16) if x.dtype is _bfloat16 else x)
    return FailedPreconditionError("the arrays of a batch norm must keep their sizes while it runs")


cdef tuple _plain_vectors(tuple vectors, int64_t channels, Dtype kind):
    return tuple([_plain_vector(v, channels, kind) for v in vectors])


def batch_norm(x, scale, offset, double epsilon, int axis, mask):
    return _call(FORWARD, (x,), (scale, offset), epsilon, axis, mask)


def batch_norm_inference(x, scale, offset, mean, variance, double epsilon, int axis, mask):
    found = _call(INFERENCE, (x,), (scale, offset, mean, variance), epsilon, axis, mask)
    return None if found is None else found[0]


def batch_norm_grad(g, x, scale, mean, variance, double epsilon, int axis, mask):
    return _call(GRAD, (g, x), (scale, mean, variance), epsilon, axis, mask)


def batch_norm_inference_grad(g, x, scale, mean, variance, double epsilon, int axis, mask):
    return _call(INFERENCE_GRAD, (g, x), (scale, mean, variance), epsilon, axis, mask)


def batch_norm_grad_grad(g, x, scale, u, a, b, double epsilon, int axis, mask):
    return _call(GRAD_GRAD, (g, x, u), (scale, a, b), epsilon, axis, mask)


def batch_norm_inference_grad_grad(g, x, scale, mean, variance, u, a, b, double epsilon, int axis, mask):
    return _call(INFERENCE_GRAD_GRAD, (g, x, u), (scale, mean, variance, a, b), epsilon, axis, mask)


# ---- modules and ops with plain arrays

cdef bint _is_vector(object v, View* view, int64_t length, Dtype kind, bint is_torch) except -1:
    return (
        _look(v, view) and view.ndim == 1 and view.shape[0] == length and view.kind == kind and view.is_torch == is_torch
    )


def elements(x, int axis, tuple vectors):
    """The elements of a channel of `x`, if `x` and one vector per channel are plain arrays that the kernels take; else 0."""
    cdef View view, other
    cdef int64_t count = 1
    cdef int i
    if not _look(x, &view) or not 0 <= axis < view.ndim or FORCED.get() is not None:
        return 0
    for v in vectors:
        if not _is_vector(v, &other, view.shape[axis], FLOAT64 if view.kind == FLOAT64 else FLOAT32, view.is_torch):
            return 0
    for i in range(view.ndim):
        if i != axis:
            count *= view.shape[i]
    return count if view.shape[axis] else 0


def blend(tuple running, tuple used, double keep, double share, double corrected):
    """Add a batch's mean and variance to running ones in place, and count the batch.

    `keep` of the running statistics stays; `share` of the mean and `corrected` of the variance is added, in double. False,
    with nothing changed, unless all are vectors of one length and dtype and the count is one int64.
    """
    cdef View mean, variance, new_mean, new_variance
    cdef weft_dl_tensor batches
    if not (_look(used[0], &new_mean) and new_mean.is_torch and new_mean.ndim == 1 and new_mean.kind <= FLOAT64):
        return False
    if not (
        _is_like(running[0], &mean, &new_mean) and _is_like(running[1], &variance, &new_mean)
        and _is_like(used[0], &new_mean, &new_mean) and _is_like(used[1], &new_variance, &new_mean)
        and _is_number(running[2], &batches)
    ):
        return False
    _blend(&mean, &new_mean, keep, share)
    _blend(&variance, &new_variance, keep, corrected)
    (<int64_t*>(<char*>batches.data + batches.byte_offset))[0] += 1
    return True


cdef bint _is_like(object v, View* view, View* like) except -1:
    """True if `v` is a vector in one piece, of the length and dtype of another."""
    cdef int64_t length = like.shape[0]
    return _is_vector(v, view, length, like.kind, True) and _in_one_piece(view, -1) and _is_stored(v, view, length)


cdef bint _is_number(object x, weft_dl_tensor* tensor) except -1:
    """True if `x` is a tensor of one int64 in host memory."""
    cdef View view
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
    view.kind, view.is_torch, view.data = FLOAT64, True, <char*>tensor.data + tensor.byte_offset
    return _is_stored(x, &view, 1)


cdef void _blend(View* old, View* new, double keep, double part) noexcept:
    cdef int64_t i
    if old.kind == FLOAT32:
        for i in range(old.shape[0]):
            (<float*>old.data)[i] = <float>(keep * (<float*>old.data)[i] + part * (<float*>new.data)[i])
    else:
        for i in range(old.shape[0]):
            (<double*>old.data)[i] = keep * (<double*>old.data)[i] + part * (<double*>new.data)[i]


# ---- settings

def num_threads():
    """How many threads a kernel runs on at most."""
    return _num_threads()


def set_num_threads(int64_t count):
    _set_num_threads(count)


def isa():
    """The instruction set in use."""
    return instruction_set().decode()


def isas():
    """The instruction sets that this machine can run, the best one first."""
    return [name.decode() for name in instruction_sets()]


def force_isa(name):
    """Use the kernels of one instruction set."""
    if not force_instruction_set(name.encode()):
        raise ValueError(f"this machine cannot run {name!r}, it can run {', '.join(isas())}")


if os.environ.get("WEFT_ISA"):
    force_isa(os.environ["WEFT_ISA"])
