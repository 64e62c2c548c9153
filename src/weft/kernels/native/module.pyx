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

cdef extern from "choose.h" namespace "weft" nogil:
    const char* instruction_set()
    vector[const char*] instruction_sets()
    bool_t force_instruction_set(const char*)

cdef extern from "team.h" namespace "weft" nogil:
    int64_t _num_threads "weft::num_threads"()
    void _set_num_threads "weft::set_num_threads"(int64_t)
    void set_torch_runner(void*)

include "arrays.pxi"


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
    if not _has_shape_of(view, like):
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


cdef object _call(Pass pass_, tuple given, tuple vectors, double epsilon, int axis, mask):
    """The results of a pass on large arrays and vectors, None if no element counts."""
    cdef View[3] views
    cdef Call call
    cdef vector[char] copies
    cdef const Arity* arity = &ARITY[<int>pass_]
    cdef int i, last = axis, main = 0 if arity.inputs == 1 else 1
    cdef View* x = &views[main]
    cdef int64_t elements, bytes
    cdef Dtype kind  # of vectors
    cdef np.ndarray flags
    cdef list arrays = list(given), results = [], made = [], held = None

    library = "numpy" if type(given[main]) is np.ndarray else library_of(given[main]) or "numpy"
    arrays[main] = _prepared(given[main], x, NULL, &last)
    for i in range(arity.inputs):
        if i != main:
            arrays[i] = _prepared(given[i], &views[i], x, &last)
    elements, flags = _set_shape(&call, x, axis, last), _flags(mask, axis, x.shape[0])
    if elements == 0 or (flags is not None and not flags.any()):
        return None
    _set_mask(&call, flags)
    call.pass_, call.dtype, call.epsilon = pass_, x.kind, epsilon
    bytes, kind = elements * _SIZES[<int>x.kind], FLOAT64 if x.kind == FLOAT64 else FLOAT32
    for i in range(arity.outputs):
        results.append(_result(x, last, bytes, flags is not None))
        call.outputs[i] = np.PyArray_DATA(<np.ndarray>results[i])
    for i in range(arity.made):
        made.append(_vector(call.shape.channels, kind))
        call.made[i] = np.PyArray_DATA(<np.ndarray>made[i])
    call.torch_threads = _threads_of_torch() if x.is_torch and bytes > LOCKED else 0
    if bytes > LOCKED and not _is_alone():
        held = [_held(array) for array in arrays]

    # From here on no Python code runs until the kernel has ended.
    if not _take_vectors(vectors, &call, kind, copies):
        return _call(pass_, given, _plain_vectors(vectors, call.shape.channels, kind), epsilon, axis, mask)
    _take_inputs(arrays, views, &call, elements)
    _run(&call, bytes)
    return tuple([_given(y, x.kind, library) for y in results] + [_given(v, kind, library) for v in made])


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


cdef bint _take_vectors(tuple vectors, Call* call, Dtype kind, vector[char]& copies) except -1:
    """Copy the vectors of a call; False if one cannot be copied as it is."""
    cdef int64_t length = call.shape.channels * _SIZES[<int>kind]
    cdef Py_ssize_t i
    copies.resize(len(vectors) * length)
    for i in range(len(vectors)):
        call.vectors[i] = copies.data() + i * length
        if not _take_vector(vectors[i], call.shape.channels, kind, copies.data() + i * length):
            return False
    return True


cdef int _take_inputs(list arrays, View* views, Call* call, int64_t elements) except -1:
    """Tell a call where its large arrays lie, if they are as they were when `views` were made."""
    cdef View now
    cdef Py_ssize_t i
    for i in range(len(arrays)):
        if not (_look(arrays[i], &now) and _is_same(&now, &views[i]) and _is_stored(arrays[i], &now, elements)):
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
    return FailedPreconditionError("the arrays of a batch norm must keep their sizes while it runs")


cdef tuple _plain_vectors(tuple vectors, int64_t channels, Dtype kind):
    return tuple([_plain_vector(v, channels, kind) for v in vectors])


def batch_norm(x, scale, offset, double epsilon, int axis, mask):
    found = _call(FORWARD, (x,), (scale, offset), epsilon, axis, mask)
    return _reference().batch_norm(x, scale, offset, epsilon, axis, mask) if found is None else found


def batch_norm_running(x, scale, offset, double epsilon, int axis, tuple old, tuple new, tuple weights):
    cdef double keep = weights[0], share = weights[1], corrected = weights[2]
    found = _call(FORWARD, (x,), (scale, offset), epsilon, axis, None)
    if found is None:
        return _reference().batch_norm_running(x, scale, offset, epsilon, axis, old, new, weights)
    y, mean, variance = found
    after_mean = _after(None if old is None else old[0], mean, keep, share, None if new is None else new[0])
    after_variance = _after(None if old is None else old[1], variance, keep, corrected, None if new is None else new[1])
    return y, mean, variance, after_mean, after_variance, _zero(mean)


cdef object _after(old, used, double keep, double share, target):
    """keep * old + share * used, computed in double, in `target` or a new vector."""
    cdef View view, before, to
    cdef np.ndarray out
    cdef int64_t i
    if not _look(used, &view) or (old is not None and not _is_channel_vector(old, &before, &view)):
        if target is not None:
            raise _unusual()
        return share * used if old is None else keep * old + share * used
    if target is None:
        out = _vector(view.shape[0], view.kind)
        to.data, to.kind, to.strides[0] = np.PyArray_BYTES(out), view.kind, 1
    elif not _is_channel_vector(target, &to, &view):
        raise _unusual()
    if view.kind == FLOAT32:
        for i in range(view.shape[0]):
            (<float*>to.data)[i * to.strides[0]] = <float>(
                share * (<float*>view.data)[i] + (0 if old is None else keep * (<float*>before.data)[i * before.strides[0]])
            )
    else:
        for i in range(view.shape[0]):
            (<double*>to.data)[i * to.strides[0]] = (
                share * (<double*>view.data)[i] + (0 if old is None else keep * (<double*>before.data)[i * before.strides[0]])
            )
    return _given(out, view.kind, "torch" if view.is_torch else "numpy") if target is None else target


cdef bint _is_channel_vector(object v, View* view, View* like) except -1:
    """True if `v` is a vector of the length, dtype and library of another, with all of its elements in memory."""
    cdef int64_t length = like.shape[0]
    return (
        _is_vector(v, view, length, like.kind, like.is_torch) and view.strides[0] >= 0
        and _is_stored(v, view, (length - 1) * view.strides[0] + 1)
    )


cdef object _unusual():
    return FailedPreconditionError(
        "running statistics must keep one number for each channel while a batch norm runs: a hook or another thread changed them"
    )


cdef object _zero(object like):
    """A scalar 0 of the library and dtype of a vector."""
    cdef np.ndarray out
    if type(like) is np.ndarray:
        out = np.PyArray_ZEROS(0, NULL, np.PyArray_TYPE(<np.ndarray>like), 0)
        return out
    return like.new_zeros(()) if library_of(like) == "torch" else sys.modules["jax"].numpy.zeros((), like.dtype)


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
    """The kernels that define the results where no element counts."""
    from weft.kernels import reference

    return reference


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
    """Add a batch's mean and variance to running ones in place, and count the batch if `running` has a third tensor.

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
        and (len(running) == 2 or _is_number(running[2], &batches))
    ):
        return False
    _blend(&mean, &new_mean, keep, share)
    _blend(&variance, &new_variance, keep, corrected)
    if len(running) == 3:
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
        raise ValueError(f"this machine cannot run {name!r}, it can run {', '.join(isas())}")


if os.environ.get("WEFT_ISA"):
    force_isa(os.environ["WEFT_ISA"])
