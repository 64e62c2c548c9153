# The border between Python and the C++ kernels: arrays of NumPy and tensors of torch become pointers, results become arrays.
#
# Other threads and hooks can change an array whenever Python code runs. So results and packed copies are made first. Then the
# inputs are looked at, and no Python code runs from there to the kernel's end. A kernel on more than LOCKED bytes releases the
# GIL; if there are other threads, its inputs are held in their places (see core/memory.py). Vectors are always copied.

import os
import sys
from importlib import import_module

cimport cython
cimport numpy as np
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.math cimport HUGE_VAL
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as bool_t
from libcpp.vector cimport vector

import numpy

from weft.core.arrays import dtype_of, library_of, tensor_memory
from weft.core.memory import hold
from weft.errors import FailedPreconditionError, InvalidArgumentError
from weft.kernels import NATIVE_VERSION, PROCESS, buffers
from weft.kernels.choice import FORCED, is_installed

np.import_array()

if NATIVE_VERSION != 5:
    raise ImportError(
        "weft._native was built from older or newer sources than weft's Python files: build it again with `pip install -e .`, or "
        "remove it to run without it"
    )

cdef enum:
    MOST = 64  # dimensions, as in NumPy
    HUGE = 1 << 21  # bytes of a huge page
    LINE = 64  # bytes of a cache line
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

cdef extern from "choose.h" namespace "weft" nogil:
    const char* instruction_set()
    vector[const char*] instruction_sets()
    bool_t force_instruction_set(const char*)

cdef extern from "team.h" namespace "weft" nogil:
    int64_t _num_threads "weft::num_threads"()
    void _set_num_threads "weft::set_num_threads"(int64_t)
    void set_torch_runner(void*, void*)

include "arrays.pxi"


# ---- a call

cdef object _misfit(what, shape, got):
    return InvalidArgumentError(f"{what} of batch norm must have the shape {list(shape)}, got {list(got)}")


cdef tuple _shape(View* view):
    cdef int i
    return tuple([view.shape[i] for i in range(view.ndim)])


cdef bint _fits(object x, View* view, View* like, int* last) except -1:
    """True if `x` can be read as it is, by the rules of `_prepared`; describes it."""
    if not _look(x, view):
        return False
    if like is not NULL:
        return view.is_torch == like.is_torch and _in_one_piece(view, last[0]) and _is_same(view, like)
    if not 0 <= last[0] < view.ndim:
        return False
    if _in_one_piece(view, -1):
        last[0] = -1
        return True
    return _in_one_piece(view, last[0])


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
    if not _has_shape_of(view, like):
        raise _misfit("a gradient", _shape(like), _shape(view))
    if not _in_one_piece(view, last[0]):
        x = _packed(x, last[0])
        _look(x, view)
    return x

cdef list _NAMES = ["float32", "float64", "float16", "bfloat16"]


cdef bint _take_vector(object v, int64_t channels, Dtype kind, View* like, char* to) except -1:
    """Copy a vector; False if it is not one that can be copied as it is, or not of the library of `like`, if that is given."""
    cdef View view
    cdef int64_t i
    if not _describe(v, &view) or view.kind != kind or view.ndim != 1 or view.shape[0] != channels or view.strides[0] < 0:
        return False
    if like is not NULL and view.is_torch != like.is_torch:
        return False
    if not _is_stored(_storage_of(v), &view, (channels - 1) * view.strides[0] + 1):
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


cdef void _fill(char* to, int64_t count, Dtype kind, double value) noexcept:
    cdef int64_t i
    for i in range(count):
        if kind == FLOAT64:
            (<double*>to)[i] = value
        else:
            (<float*>to)[i] = <float>value


cdef object _plain_vector(object v, int64_t channels, Dtype kind):
    """A vector in memory of its own, in the dtype of vectors."""
    v = _readable(v)
    if type(v) is not np.ndarray:
        v = tensor_memory(v)
    if v.shape != (channels,):
        raise _misfit("a vector", (channels,), v.shape)
    return numpy.array(v, numpy.float64 if kind == FLOAT64 else numpy.float32)


cdef np.ndarray _flags(object mask, int axis, int64_t rows):
    """A copy of a mask, one byte for each row; None for no mask."""
    if mask is None:
        return None
    if axis == 0:
        raise InvalidArgumentError("a mask is for rows, and axis 0 holds the channels here")
    found = numpy.array(mask.detach().numpy() if library_of(mask) == "torch" else mask, numpy.bool).view(numpy.uint8)
    if found.shape != (rows,):
        raise _misfit("the mask", (rows,), found.shape)
    return found


cdef struct Blend:
    double keep, share, corrected  # of the old running statistics, of the new mean and of the new variance
    bint has_bessel  # whether `corrected` is still to be multiplied by n / (n - 1)
    int outside  # how many of the results are for the caller; the others stay NumPy arrays


cdef tuple _call(
    Pass pass_, tuple given, tuple vectors, double epsilon, int axis, mask, int64_t least=0, Blend* blend=NULL, bint has_copies=False
):
    """The results of a pass on large arrays and vectors; None if no element counts, or if sums of squares do not fit float32.

    With `least`, all arrays must be plain and of one library, and `least` elements of a channel must count; None if not. With
    `blend`, the results also have the new running statistics, and the last two of four vectors are the old ones. With `has_copies`,
    of INFERENCE, two copies of the mean and the variance follow y.
    """
    cdef View[3] views
    cdef Call call
    cdef vector[char] copies
    cdef const Arity* arity = &ARITY[<int>pass_]
    cdef int i, k, last = axis, main = 0 if arity.inputs == 1 else 1
    cdef View* x = &views[main]
    cdef View* like = NULL
    cdef const void* old = NULL
    cdef int64_t elements, bytes, count
    cdef double corrected
    cdef Dtype kind  # of vectors
    cdef np.ndarray flags
    cdef list arrays = list(given), results = [], held = None
    cdef str library = _library(given[main])
    for k in range(arity.inputs):  # x comes first
        i = (main + k) % arity.inputs
        if not least:
            arrays[i] = _prepared(given[i], &views[i], like, &last)
        elif not _fits(given[i], &views[i], like, &last):
            return None
        like = x
    elements, flags = _set_shape(&call, x, axis, last), _flags(mask, axis, x.shape[0])
    if elements == 0:
        return None
    count = elements // x.shape[axis]
    if flags is not None:
        count = count // x.shape[0] * numpy.count_nonzero(flags)
    if count == 0 or count < least:
        return None
    _set_mask(&call, flags)
    call.pass_, call.dtype, call.epsilon = pass_, x.kind, epsilon
    bytes, kind = elements * _SIZES[<int>x.kind], FLOAT64 if x.kind == FLOAT64 else FLOAT32
    for i in range(arity.outputs):
        results.append(_result(x, last, bytes, flags is not None))
        call.outputs[i] = np.PyArray_DATA(<np.ndarray>results[i])
    for i in range(arity.made):
        results.append(_vector(call.shape.channels, kind))
        call.made[i] = np.PyArray_DATA(<np.ndarray>results[arity.outputs + i])
    if blend is not NULL:
        results.extend((_vector(call.shape.channels, kind), _vector(call.shape.channels, kind)))
    call.torch_threads = _threads_of_torch() if x.is_torch and bytes > LOCKED else 0
    if bytes > LOCKED and not _is_alone():
        held = [_held(array) for array in arrays]

    # From here on no Python code runs until the kernel has ended.
    if not _take_vectors(vectors, &call, kind, x if least else NULL, copies):
        if least:
            return None
        return _call(pass_, given, _plain_vectors(vectors, call.shape.channels, kind), epsilon, axis, mask, 0, blend)
    _take_inputs(arrays, views, held, &call, elements)
    _run(&call, bytes)
    if pass_ == FORWARD and _has_infinity(results[2]):
        return None
    if blend is not NULL:
        corrected = blend.corrected * (<double>count / max(count - 1, 1) if blend.has_bessel else 1.0)
        for i in range(2):
            if len(vectors) == 4:
                old = call.vectors[2 + i]
            _blend(results[1 + i], old, blend.keep, corrected if i else blend.share, results[3 + i])
    for i in range(4 if has_copies else 0):
        results.append(_vector(call.shape.channels, kind))
        memcpy(np.PyArray_DATA(<np.ndarray>results[1 + i]), call.vectors[2 + i % 2], call.shape.channels * _SIZES[<int>kind])
    if library == "numpy":
        return tuple(results)
    last = len(results) if blend is NULL else blend.outside
    for i in range(last):
        results[i] = _in_library(results[i], x.kind if i < arity.outputs else kind, library)
    return tuple(results)


cdef void _blend(np.ndarray used, const void* old, double keep, double share, np.ndarray new) noexcept:
    """new = keep * old + share * used, computed in double; without `old`, share * used."""
    cdef int64_t i, count = np.PyArray_SIZE(used)
    cdef void* a = np.PyArray_DATA(used)
    cdef void* to = np.PyArray_DATA(new)
    if np.PyArray_TYPE(used) == np.NPY_FLOAT32:
        for i in range(count):
            (<float*>to)[i] = <float>(share * (<float*>a)[i] + (0 if old is NULL else keep * (<const float*>old)[i]))
    else:
        for i in range(count):
            (<double*>to)[i] = share * (<double*>a)[i] + (0 if old is NULL else keep * (<const double*>old)[i])


cdef bint _has_infinity(np.ndarray vector) noexcept:
    cdef int64_t i, count = np.PyArray_SIZE(vector)
    cdef void* data = np.PyArray_DATA(vector)
    for i in range(count):
        if ((<double*>data)[i] if np.PyArray_TYPE(vector) == np.NPY_FLOAT64 else (<float*>data)[i]) == HUGE_VAL:
            return True
    return False


cdef int64_t _set_shape(Call* call, View* x, int axis, int last) noexcept:
    """Tell a call the shape of `x`, and return the number of its elements."""
    cdef int64_t elements = 1
    cdef int i
    call.shape.channels, call.shape.depth = x.shape[axis], 1
    for i in range(x.ndim):
        elements *= x.shape[i]
        if i > axis and last < 0:
            call.shape.depth *= x.shape[i]
    if elements:
        call.shape.rows = elements // (call.shape.channels * call.shape.depth)
    return elements


cdef void _set_mask(Call* call, np.ndarray flags) noexcept:
    call.mask = NULL
    call.mask_rows = 0
    if flags is not None:
        call.mask = <uint8_t*>np.PyArray_DATA(flags)
        call.mask_rows = np.PyArray_SIZE(flags)


cdef bint _take_vectors(tuple vectors, Call* call, Dtype kind, View* like, vector[char]& copies) except -1:
    """Copy the vectors of a call; False if one cannot be copied as it is."""
    cdef int64_t length = call.shape.channels * _SIZES[<int>kind]
    cdef Py_ssize_t i
    copies.resize(len(vectors) * length)
    for i in range(len(vectors)):
        call.vectors[i] = copies.data() + i * length
        if vectors[i] is None:  # of a scale or an offset
            _fill(copies.data() + i * length, call.shape.channels, kind, 1 if i == 0 else 0)
        elif not _take_vector(vectors[i], call.shape.channels, kind, like, copies.data() + i * length):
            return False
    return True


cdef int _take_inputs(list arrays, View* views, list held, Call* call, int64_t elements) except -1:
    """Tell a call where its large arrays lie, if they are as they were when `views` were made, and where `held` holds them."""
    cdef View now
    cdef Py_ssize_t i
    cdef list storages = [_storage_of(x) for x in arrays]  # all of them before the first look
    for i in range(len(arrays)):
        if not (_describe(arrays[i], &now) and _is_same(&now, &views[i]) and _is_stored(storages[i], &now, elements)):
            raise _changed(arrays[i])
        if held is not None and now.is_torch and now.data != np.PyArray_BYTES(held[i]):  # `x.data` was set
            raise _changed(arrays[i])
        call.inputs[i] = now.data
    return 0


cdef int _run(Call* call, int64_t bytes) except -1:
    cdef bint done
    if bytes <= LOCKED:
        done = run(call[0])
    else:
        with nogil:
            done = run(call[0])
    if not done:
        raise MemoryError("there is no room for the sums of a batch norm")
    return 0


cdef object _changed(object x):
    """The error of an array that changed during the call, or whose storage is too small."""
    if type(x) is not np.ndarray:
        x = x.detach()
        tensor_memory(x.view(_int16) if x.dtype is _bfloat16 else x)
    return FailedPreconditionError("the arrays of a batch norm must keep their memory and sizes while it runs")


cdef tuple _plain_vectors(tuple vectors, int64_t channels, Dtype kind):
    return tuple([_plain_vector(v, channels, kind) for v in vectors])


def batch_norm(x, scale, offset, double epsilon, int axis, mask):
    found = _call(FORWARD, (x,), (scale, offset), epsilon, axis, mask)
    return _reference().batch_norm(x, scale, offset, epsilon, axis, mask) if found is None else found


def batch_norm_running(x, scale, offset, double epsilon, int axis, tuple old, tuple weights):
    cdef Blend blend
    blend.keep, blend.share, blend.corrected = weights
    blend.has_bessel, blend.outside = False, 5
    vectors = (scale, offset) if old is None else (scale, offset, *old)
    found = _call(FORWARD, (x,), vectors, epsilon, axis, None, 0, &blend)
    if found is None:
        return _reference().batch_norm_running(x, scale, offset, epsilon, axis, old, weights)
    return *found, _zero(found[1])


def keep(mean, variance, batches, tuple new):
    """Store new running statistics in tensors, and count the batch. Either all three are changed, or an error is raised."""
    cdef View[2] views
    cdef View counter
    cdef weft_dl_tensor count
    cdef list storages = [_storage_of(x) for x in (mean, variance, batches)]  # all of them before the first look
    if not (_may_change(mean, variance, batches) and _is_number(batches, -1, &count)):
        raise _unusual()
    counter.kind, counter.is_torch, counter.data = FLOAT64, True, <char*>count.data + count.byte_offset
    if not (
        _is_stored(storages[2], &counter, 1)
        and _is_target(mean, storages[0], &views[0], new[0]) and _is_target(variance, storages[1], &views[1], new[1])
    ):
        raise _unusual()
    (<int64_t*>counter.data)[0] += 1
    _copy_vector(new[0], &views[0])
    _copy_vector(new[1], &views[1])


cdef bint _may_change(mean, variance, batches) except -1:
    """True if running statistics and their count are tensors that may be changed in place. Modes of torch may run here."""
    for v in (mean, variance, batches):
        if type(v) is not _tensor or _is_inference(v):
            return False
    return True


cdef bint _is_target(object v, object storage, View* view, np.ndarray like) except -1:
    """True if `v` is a vector of the length and dtype of another, with each of its elements in a place of its own."""
    cdef int64_t length = np.PyArray_SIZE(like)
    return (
        _is_vector(v, view) and view.shape[0] == length and view.kind == _kind_of(like)
        and _is_stored(storage, view, (length - 1) * view.strides[0] + 1)
    )


cdef bint _is_vector(object v, View* view) except -1:
    return _describe(v, view) and view.ndim == 1 and (view.strides[0] > 0 or view.shape[0] <= 1)


cdef void _copy_vector(np.ndarray source, View* to) noexcept:
    cdef int64_t i
    if to.kind == FLOAT32:
        for i in range(to.shape[0]):
            (<float*>to.data)[i * to.strides[0]] = (<float*>np.PyArray_DATA(source))[i]
    else:
        for i in range(to.shape[0]):
            (<double*>to.data)[i * to.strides[0]] = (<double*>np.PyArray_DATA(source))[i]


cdef object _unusual():
    return FailedPreconditionError(
        "running statistics must keep one number for each channel while a batch norm runs: a hook or another thread changed them"
    )


cdef object _zero(object like):
    """A scalar 0 of the library and dtype of a vector."""
    cdef int number = np.NPY_FLOAT64 if like.itemsize == 8 else np.NPY_FLOAT32
    return _in_library(np.PyArray_ZEROS(0, NULL, number, 0), FLOAT32, _library(like))


def batch_norm_inference(x, scale, offset, mean, variance, double epsilon, int axis, mask):
    found = _call(INFERENCE, (x,), (scale, offset, mean, variance), epsilon, axis, mask)
    if found is None:
        return _reference().batch_norm_inference(x, scale, offset, mean, variance, epsilon, axis, mask)
    return found[0]


def batch_norm_grad(g, x, scale, mean, variance, double epsilon, int axis, mask):
    found = _call(GRAD, (g, x), (scale, mean, variance), epsilon, axis, mask)
    return _reference().batch_norm_grad(g, x, scale, mean, variance, epsilon, axis, mask) if found is None else found


def batch_norm_inference_grad(g, x, scale, mean, variance, double epsilon, int axis, mask):
    found = _call(INFERENCE_GRAD, (g, x), (scale, mean, variance), epsilon, axis, mask)
    if found is None:
        return _reference().batch_norm_inference_grad(g, x, scale, mean, variance, epsilon, axis, mask)
    return found


def batch_norm_grad_grad(g, x, scale, u, a, b, double epsilon, int axis, mask):
    found = _call(GRAD_GRAD, (g, x, u), (scale, a, b), epsilon, axis, mask)
    return _reference().batch_norm_grad_grad(g, x, scale, u, a, b, epsilon, axis, mask) if found is None else found


def batch_norm_inference_grad_grad(g, x, scale, mean, variance, u, a, b, double epsilon, int axis, mask):
    found = _call(INFERENCE_GRAD_GRAD, (g, x, u), (scale, mean, variance, a, b), epsilon, axis, mask)
    if found is None:
        given = g, x, scale, mean, variance, u, a, b
        return _reference().batch_norm_inference_grad_grad(*given, epsilon, axis, mask)
    return found


cdef object _reference():
    """The kernels that take what these do not: no elements that count, and variances that float32 cannot sum up."""
    from weft.kernels import reference

    return reference


include "plain.pxi"
include "cuda.pxi"
include "launch.pxi"
include "rows.pxi"
include "small.pxi"
include "wakeup.pxi"


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
        raise InvalidArgumentError(
            f"the instruction set must be one of {', '.join(isas())} on this machine, got {name!r}: set WEFT_ISA to one, or unset it"
        )


if os.environ.get("WEFT_ISA"):
    force_isa(os.environ["WEFT_ISA"])
