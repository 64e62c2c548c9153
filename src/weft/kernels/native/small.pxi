# The functions of core/small.py over NumPy's C interface, with the same results. Included by module.pyx.

from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE

cdef int LARGE = 1 << 17  # bytes: for larger arrays these functions save nothing
cdef np.npy_intp MUCH = 1 << 28  # bytes: smaller arrays need no check of their size in memory


cdef inline bint _is_plain(np.ndarray x):
    return (
        np.PyArray_NDIM(x) > 0
        and np.PyArray_TYPE(x) <= np.NPY_CLONGDOUBLE
        and np.PyArray_ISCARRAY_RO(x)
    )


cdef inline bint _is_simple(x):
    """True if `x` is a NumPy array of numbers in native byte order that is not large."""
    if type(x) is not np.ndarray:
        return False
    cdef np.ndarray array = x
    cdef int number = np.PyArray_TYPE(array)
    return (
        (number <= np.NPY_CDOUBLE and number != np.NPY_LONGDOUBLE or number in (np.NPY_FLOAT16, _bfloat16_number))
        and np.PyArray_ISNOTSWAPPED(array)
        and np.PyArray_NBYTES(array) < MUCH
    )


cdef enum:
    NOT_PLAIN = 0
    OF_NUMPY = 1
    OF_TORCH = 2


cdef int _kind_of_input(x) except -1:
    """Of which library an array is that an op need not check or record."""
    cdef weft_dl_tensor tensor
    cdef int64_t bytes
    cdef bint is_empty = False
    cdef int i
    if type(x) is np.ndarray:
        return OF_NUMPY if _is_simple(x) else NOT_PLAIN
    if (_tensor is None and not _meet_torch()) or _exchange is NULL or not (type(x) is _tensor or type(x) is _parameter):
        return NOT_PLAIN
    if x.requires_grad and _is_grad_enabled():
        return NOT_PLAIN
    try:
        _exchange.look(<void*>x, &tensor)
    except Exception:  # it has no memory of its own, or a dtype that DLPack lacks
        return NOT_PLAIN
    bytes = tensor.bits // 8
    for i in range(tensor.ndim):
        if tensor.shape[i] == 0:
            is_empty = True
        else:
            bytes *= tensor.shape[i]
        if bytes >= MUCH:
            return NOT_PLAIN
    return NOT_PLAIN if tensor.data is NULL and not is_empty else OF_TORCH  # the storage of the former was freed


def are_plain(tuple values, dict named, tuple inputs):
    cdef Py_ssize_t place, count = len(values)
    cdef bint is_list
    cdef int kind, kinds = 0
    tensor = None
    for place, name, is_list in inputs:
        x = values[place] if place < count else named.get(name)
        if is_list:
            if type(x) is not list and type(x) is not tuple:
                return False
        elif type(x) is int or type(x) is float:
            continue
        for y in x if is_list else (x,):
            kind = _kind_of_input(y)
            if kind == NOT_PLAIN:
                return False
            kinds |= kind
            if kind == OF_TORCH:
                tensor = y
    return kinds < OF_TORCH or (kinds == OF_TORCH and not _is_followed(tensor))


cdef inline np.ndarray _rows_like(np.ndarray x, np.npy_intp rows):
    """A new array of `rows` rows with the trailing dimensions and dtype of `x`."""
    cdef np.npy_intp[32] shape
    cdef int i, ndim = np.PyArray_NDIM(x)
    shape[0] = rows
    for i in range(1, ndim):
        shape[i] = np.PyArray_DIM(x, i)
    return np.PyArray_EMPTY(ndim, shape, np.PyArray_TYPE(x), 0)


def no_rows(x):
    if type(x) is np.ndarray and _is_plain(x) and np.PyArray_NDIM(x) <= 32:
        return _rows_like(x, 0)
    return x[:0].copy()


def rows_alike(x, like, bint grad):
    if type(x) is not np.ndarray:
        return _tensor_rows(x, like, grad)
    return _array_rows(x, like) if type(like) is np.ndarray else -1


cdef np.npy_intp _array_rows(np.ndarray x, np.ndarray like):
    cdef int i
    if np.PyArray_DESCR(x) is not np.PyArray_DESCR(like) or np.PyArray_NDIM(x) != np.PyArray_NDIM(like) or np.PyArray_NDIM(x) == 0:
        return -1
    for i in range(1, np.PyArray_NDIM(like)):
        if np.PyArray_DIM(x, i) != np.PyArray_DIM(like, i):
            return -1
    return np.PyArray_DIM(x, 0)


cdef int64_t _tensor_rows(x, like, bint grad) except -2:
    cdef weft_dl_tensor a, b
    cdef int i
    if (_tensor is None and not _meet_torch()) or _exchange is NULL or type(like) is not _tensor:
        return -1
    if not (type(x) is _tensor or type(x) is _parameter) or _are_transforms_active() or _is_followed(x):
        return -1
    try:
        _exchange.look(<void*>x, &a)
        _exchange.look(<void*>like, &b)
    except Exception:  # it has no memory of its own, or a dtype that DLPack lacks
        return -1
    if a.data is NULL or a.code != b.code or a.bits != b.bits or a.ndim != b.ndim or a.ndim == 0:
        return -1
    if a.device_type != b.device_type or a.device_id != b.device_id:
        return -1
    for i in range(1, a.ndim):
        if a.shape[i] != b.shape[i]:
            return -1
    return -1 if grad and x.requires_grad is not like.requires_grad else a.shape[0]


def scalar(long long value):
    cdef np.ndarray out = np.PyArray_EMPTY(0, NULL, np.NPY_INT64, 0)
    (<np.int64_t*>np.PyArray_DATA(out))[0] = value
    return out


def no_index():
    cdef np.npy_intp[2] shape
    shape[0], shape[1] = 0, 3
    return np.PyArray_EMPTY(2, shape, np.NPY_INT64, 0)


def index(list numbers):
    cdef np.npy_intp[2] shape
    cdef Py_ssize_t i, count = PyList_GET_SIZE(numbers)
    if count % 3:
        raise ValueError(f"an index has three columns, got {count} numbers")
    shape[0], shape[1] = count // 3, 3
    cdef np.ndarray out = np.PyArray_EMPTY(2, shape, np.NPY_INT64, 0)
    cdef np.int64_t* data = <np.int64_t*>np.PyArray_DATA(out)
    for i in range(count):
        data[i] = <object>PyList_GET_ITEM(numbers, i)
    return out


def stack(inputs):
    cdef np.ndarray first, x, out
    cdef list arrays = []
    cdef np.npy_intp rows = 0, at = 0, size
    cdef Py_ssize_t i, count
    cdef int d
    for tensors in inputs:
        if type(tensors) is list and len(<list>tensors) == 1:
            arrays.append((<list>tensors)[0])
        elif type(tensors) is tuple and len(<tuple>tensors) == 1:
            arrays.append((<tuple>tensors)[0])
        else:
            return None
    count = PyList_GET_SIZE(arrays)
    if count == 0 or type(arrays[0]) is not np.ndarray:
        return None
    first = arrays[0]
    if not _is_plain(first) or np.PyArray_NDIM(first) > 32:
        return None
    for i in range(count):
        if type(<object>PyList_GET_ITEM(arrays, i)) is not np.ndarray:
            return None
        x = <np.ndarray>PyList_GET_ITEM(arrays, i)
        if (
            np.PyArray_TYPE(x) != np.PyArray_TYPE(first)
            or np.PyArray_NDIM(x) != np.PyArray_NDIM(first)
            or not np.PyArray_ISCARRAY_RO(x)
        ):
            return None
        for d in range(1, np.PyArray_NDIM(x)):
            if np.PyArray_DIM(x, d) != np.PyArray_DIM(first, d):
                return None
        rows += np.PyArray_DIM(x, 0)
        at += np.PyArray_NBYTES(x)
    if at > LARGE:
        return None
    out = _rows_like(first, rows)
    at = 0
    for i in range(count):
        x = <np.ndarray>PyList_GET_ITEM(arrays, i)
        size = np.PyArray_NBYTES(x)
        memcpy(np.PyArray_BYTES(out) + at, np.PyArray_DATA(x), size)
        at += size
    return out


def cut(x, bounds):
    cdef np.ndarray source, piece
    cdef np.npy_intp start, stop, size
    if type(x) is not np.ndarray:
        return None
    source = x
    if not _is_plain(source) or np.PyArray_NDIM(source) > 32 or np.PyArray_NBYTES(source) > LARGE:
        return None
    size = np.PyArray_NBYTES(source) // max(np.PyArray_DIM(source, 0), 1)
    cdef list pieces = []
    for start, stop in bounds:
        if not 0 <= start <= stop <= np.PyArray_DIM(source, 0):
            return None
        piece = _rows_like(source, stop - start)
        memcpy(np.PyArray_DATA(piece), np.PyArray_BYTES(source) + start * size, (stop - start) * size)
        pieces.append(piece)
    return pieces


cdef class Pieces:
    cdef np.ndarray _x
    cdef list _edges
    cdef np.npy_intp _size  # of a row, in bytes

    def __len__(self):
        return len(self._edges) - 1

    def __getitem__(self, Py_ssize_t i):
        if not 0 <= i < len(self._edges) - 1:
            raise IndexError(i)
        cdef np.npy_intp start = self._edges[i], stop = self._edges[i + 1]
        cdef np.ndarray piece = _rows_like(self._x, stop - start)
        memcpy(np.PyArray_DATA(piece), np.PyArray_BYTES(self._x) + start * self._size, (stop - start) * self._size)
        return piece


def pieces(x, list edges):
    cdef np.ndarray source
    cdef Pieces made
    cdef np.npy_intp last = 0, edge
    if type(x) is not np.ndarray:
        return None
    source = x
    if not _is_plain(source) or np.PyArray_NDIM(source) > 32 or np.PyArray_NBYTES(source) > LARGE:
        return None
    if not edges:
        return None
    for edge in edges:
        if not last <= edge <= np.PyArray_DIM(source, 0):
            return None
        last = edge
    made = Pieces.__new__(Pieces)
    made._x = _rows_like(source, np.PyArray_DIM(source, 0))
    memcpy(np.PyArray_DATA(made._x), np.PyArray_DATA(source), np.PyArray_NBYTES(source))
    made._edges = edges
    made._size = np.PyArray_NBYTES(source) // max(np.PyArray_DIM(source, 0), 1)
    return made
