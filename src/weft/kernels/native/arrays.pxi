# Arrays of NumPy and tensors of torch as pointers, room for results, and memory that stays in its place. Included by module.pyx.

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
        int32_t device_id
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
cdef object _tensor = None, _parameter = None, _from_numpy = None, _is_neg = None, _is_inference = None, _bfloat16 = None
cdef object _int16 = None, _strided = None, _storage = None, _data_ptr = None, _nbytes = None, _threads_of_torch = None
cdef object _is_grad_enabled = None, _is_followed = None, _are_transforms_active = None


cdef bint _meet_torch() except -1:
    """True if torch is imported. Its tensors are read by its exchange table, which it has since 2.10."""
    global _exchange, _tensor, _parameter, _from_numpy, _is_neg, _is_inference, _bfloat16, _int16, _strided, _storage
    global _data_ptr, _nbytes, _threads_of_torch, _is_grad_enabled, _is_followed, _are_transforms_active
    torch = sys.modules.get("torch")
    if not hasattr(torch, "nn") or not hasattr(torch.nn, "Parameter"):  # another thread is importing it
        return False
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        _exchange = <weft_dl_exchange*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        if _exchange.major != 1:
            _exchange = NULL
    _parameter, _from_numpy, _is_neg, _bfloat16 = torch.nn.Parameter, torch.from_numpy, torch.Tensor.is_neg, torch.bfloat16
    _is_inference = torch.Tensor.is_inference
    _int16, _strided, _storage = torch.int16, torch.strided, torch.Tensor.untyped_storage
    _data_ptr, _nbytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
    _threads_of_torch, _is_grad_enabled = torch.get_num_threads, torch.is_grad_enabled
    internals = import_module("weft.core.torch_internals")
    _is_followed, _are_transforms_active = internals.is_followed, internals.are_transforms_active
    file = internals.extension_file()
    if file is not None and os.getpid() == PROCESS:  # OpenMP's threads stay behind in a fork: a call for them would never return
        import ctypes

        try:
            openmp = ctypes.CDLL(file)
            set_torch_runner(_address(openmp.GOMP_parallel), _address(openmp.omp_get_thread_num))
        except (OSError, AttributeError):
            pass
    _tensor = torch.Tensor
    return True


cdef void* _address(object function) except NULL:
    """Where a function of ctypes lies."""
    import ctypes

    return <void*><size_t>ctypes.cast(function, ctypes.c_void_p).value


# ---- arrays

cdef struct View:
    char* data
    Dtype kind  # DTYPES for any other
    bint is_torch
    int device  # the number of a CUDA device, -1 in host memory
    int ndim
    int64_t[MOST] shape
    int64_t[MOST] strides  # in elements


cdef bint _look(object x, View* view) except -1:
    """Describe `x`; False if its memory cannot be read as it is."""
    if type(x) is np.ndarray:
        return _look_at_array(x, view)
    return (_tensor is not None or _meet_torch()) and _look_at_tensor(x, view) and view.device < 0 and not _is_neg(x)


cdef bint _describe(object x, View* view) except -1:
    """As `_look`, without running Python code: whether a tensor's values are those in memory, `_storage_of` tells."""
    if type(x) is np.ndarray:
        return _look_at_array(x, view)
    return _tensor is not None and _look_at_tensor(x, view) and view.device < 0


cdef str _library(object x):
    """The library of an array."""
    if type(x) is np.ndarray:
        return "numpy"
    return "torch" if type(x) is _tensor else library_of(x) or "numpy"


cdef bint _look_at_array(np.ndarray x, View* view) except -1:
    cdef int i
    view.kind, view.ndim, view.data = _kind_of(x), np.PyArray_NDIM(x), np.PyArray_BYTES(x)
    view.is_torch, view.device = False, -1
    if view.kind == DTYPES or view.ndim > MOST or not np.PyArray_ISBEHAVED_RO(x):
        return False
    for i in range(view.ndim):
        view.shape[i] = np.PyArray_DIM(x, i)
        view.strides[i] = np.PyArray_STRIDE(x, i) // _SIZES[<int>view.kind]
    return True


cdef bint _look_at_tensor(object x, View* view) except -1:
    """Describe a tensor in the memory of the host or of a CUDA device."""
    cdef weft_dl_tensor tensor
    cdef int i
    if _exchange is NULL or not (type(x) is _tensor or type(x) is _parameter):
        return False
    try:
        _exchange.look(<void*>x, &tensor)
    except RuntimeError:  # it has no memory of its own: a wrapper of `torch.func`, a sparse tensor
        return False
    if tensor.data is NULL or not 1 <= tensor.device_type <= 2 or tensor.ndim > MOST:
        return False
    view.kind, view.device = DTYPES, tensor.device_id if tensor.device_type == 2 else -1
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


cdef object _storage_of(object x):
    """The storage of a tensor whose values are those in memory; None for others.

    Finalizers, and torch function modes, may run here, and change any array.
    """
    if _tensor is None or not (type(x) is _tensor or type(x) is _parameter) or _is_neg(x):
        return None
    return _storage(x)


cdef bint _is_stored(object storage, View* view, int64_t elements) except -1:
    """True if the storage of a tensor has so many elements from its first one on: it may have been resized."""
    if not view.is_torch or elements == 0:
        return True
    if storage is None:
        return False
    cdef size_t start = _data_ptr(storage), place = <size_t>view.data
    return place >= start and place - start + elements * _SIZES[<int>view.kind] <= <size_t>_nbytes(storage)


cdef object _readable(object x):
    """`x` as an array that `_look` can describe, a copy if need be."""
    if type(x) is not np.ndarray and library_of(x) == "torch":
        if x.layout is not _strided:
            raise InvalidArgumentError(f"batch norm takes dense tensors, got one of the layout {x.layout}")
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
    """Memory of `buffers`, returned when the last array on it is deleted.

    It starts `past` a boundary of HUGE bytes, so that all of it can lie on huge pages. What comes before is never touched.
    """
    cdef object memory
    cdef Py_buffer place
    cdef char* start

    def __cinit__(self, int64_t size, int64_t past):
        memory = buffers.take(size + past + HUGE if size >= HUGE else size + past)
        PyObject_GetBuffer(memory, &self.place, PyBUF_WRITABLE)
        self.memory = memory
        self.start = <char*>self.place.buf
        if size >= HUGE:
            self.start += -<uintptr_t>self.place.buf % HUGE
        self.start += past

    def __dealloc__(self):
        if self.memory is not None:
            PyBuffer_Release(&self.place)
            try:
                buffers.give(self.memory)
            except KeyboardInterrupt:  # Python would ignore it here
                PyErr_SetInterrupt()


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
        loan = Loan(bytes, <uintptr_t>x.data % LINE)  # as far from a cache line as `x`: see native/rows.h
        found = np.PyArray_New(np.ndarray, x.ndim, shape, number, strides, loan.start, 0, np.NPY_ARRAY_BEHAVED, None)
        np.set_array_base(found, loan)
    if is_masked:
        memset(np.PyArray_DATA(found), 0, bytes)
    return found


cdef np.ndarray _vector(int64_t channels, Dtype kind):
    """Room for a per-channel result."""
    cdef np.npy_intp count = channels
    return np.PyArray_EMPTY(1, &count, np.NPY_FLOAT64 if kind == FLOAT64 else np.NPY_FLOAT32, 0)


cdef _in_library(np.ndarray array, Dtype kind, object library):
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
    void PyErr_SetInterrupt()
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


cdef bint _has_shape_of(View* a, View* b) noexcept:
    cdef int i
    if a.ndim != b.ndim:
        return False
    for i in range(a.ndim):
        if a.shape[i] != b.shape[i]:
            return False
    return True


cdef bint _is_same(View* a, View* b) noexcept:
    """True if two arrays have the same dtype, shape and layout."""
    cdef int i
    if a.kind != b.kind or not _has_shape_of(a, b):
        return False
    for i in range(a.ndim):
        if a.strides[i] != b.strides[i] and a.shape[i] != 1:
            return False
    return True
