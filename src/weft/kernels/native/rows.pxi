# The row kernels: rows of different lengths in one buffer. Included by module.pyx; kernels/reference.py says what each one does.

cdef extern from "ragged.h" namespace "weft" nogil:
    ctypedef enum Element:
        UINT8
        FLOAT
        INT8
        ELEMENTS
    ctypedef enum Outcome:
        OUTSIDE
        DONE
        OUT_OF_ORDER
        NO_MEMORY
    ctypedef struct RowCall:
        const char* values
        int64_t count, width
        const int64_t* splits
        int64_t splits_size
        const int64_t* starts
        const int64_t* lengths
        const int64_t* targets
        int64_t blocks
        char* out
        int64_t rows, columns
        const char* fill
        int64_t fill_width
        int64_t* made_starts
        int64_t* made_splits
    ctypedef Outcome (*RowKernel)(const RowCall&, int64_t, int64_t)
    ctypedef struct RowKernels:
        const RowKernel* sum
        const RowKernel* max
        const RowKernel* softmax
        const RowKernel* add
        const RowKernel* range
        const RowKernel* pad
        RowKernel place
        const RowKernel* place_in_order
        RowKernel take
        int64_t (**all_below)(const void*, int64_t, int64_t)
        int64_t (**longest)(const void*, int64_t, int64_t)
    Outcome run_rows(RowKernel, const RowCall&, int64_t, int64_t, const int64_t*, int64_t)
    Outcome run_bounds(const RowCall&, int64_t)
    void _copy "weft::copy"(char*, const char*, int64_t)
    void _set_part_bytes "weft::set_part_bytes"(int64_t)

cdef extern from "choose.h" namespace "weft" nogil:
    const RowKernels& row_kernels()


# ---- arrays

@cython.final
@cython.freelist(16)
cdef class Index:
    """A vector of int64 whose memory nobody can resize."""
    cdef object array, held
    cdef const int64_t* data
    cdef int64_t size

    def __cinit__(self, x):
        array = numpy.ascontiguousarray(x, numpy.int64)
        if not np.PyArray_ISALIGNED(<np.ndarray>array):
            array = array.copy()
        self.held, self.array = hold(array), array
        if np.PyArray_NDIM(<np.ndarray>array) != 1:
            raise _misplaced()
        self.data, self.size = <const int64_t*>np.PyArray_DATA(<np.ndarray>array), np.PyArray_SIZE(array)


cdef Index _splits_of(x):
    """At least one split, the last one not negative."""
    cdef Index found = Index(x)
    if found.size < 1 or found.data[found.size - 1] < 0:
        raise _misplaced()
    return found


cdef Index _splits_of_result(x):
    """Splits that begin with 0: the kernel then writes the whole result."""
    cdef Index found = _splits_of(x)
    if found.data[0] != 0:
        raise _misplaced()
    return found


@cython.final
@cython.freelist(8)
cdef class Rows:
    """The values of an array in host memory, in one piece. The array is nobody else's, so its shape stays that of the memory."""
    cdef np.ndarray array
    cdef object held, like
    cdef int64_t count, width  # entries, and the elements of each
    cdef int64_t item  # bytes of an element
    cdef bint is_torch

    def __cinit__(self, x):
        self.like, self.is_torch = x, type(x) is not np.ndarray and library_of(x) == "torch"
        if self.is_torch:
            x = x.detach()
            x = self.held = tensor_memory(x.view(sys.modules["torch"].int16) if dtype_of(x) == "bfloat16" else x)
        elif isinstance(x, np.ndarray):
            self.held, x = hold(x), x.view(numpy.ndarray)
        x = numpy.asarray(x, order="C")
        if not (np.PyArray_ISALIGNED(<np.ndarray>x) and np.PyArray_ISNOTSWAPPED(<np.ndarray>x)):
            x = x.astype(x.dtype.newbyteorder("="), order="C")
        self.array = x
        if np.PyArray_NDIM(x) < 1:
            raise _misplaced()
        self.count, self.width, self.item = np.PyArray_DIM(x, 0), 1, np.PyArray_ITEMSIZE(x)
        cdef int i
        for i in range(1, np.PyArray_NDIM(x)):
            self.width *= np.PyArray_DIM(x, i)

    cdef np.ndarray room(self, int64_t rows):
        """Room for entries like these."""
        return buffers.empty((rows, *(<object>self.array).shape[1:]), self.array.dtype)

    cdef object in_library(self, np.ndarray out):
        """A result in the library and dtype of the values."""
        if type(self.like) is np.ndarray:
            return out
        if self.is_torch:
            return sys.modules["torch"].from_numpy(out).view(self.like.dtype)
        return sys.modules["jax"].numpy.asarray(out) if library_of(self.like) == "jax" else out

    cdef RowCall call(self, np.ndarray out):
        cdef RowCall call
        memset(&call, 0, sizeof(call))
        call.values, call.count, call.width = np.PyArray_BYTES(self.array), self.count, self.width
        call.out = np.PyArray_BYTES(out)
        if np.PyArray_NDIM(out):
            call.rows = np.PyArray_DIM(out, 0)
        return call

    cdef int64_t bytes(self) noexcept:
        return self.count * self.width * self.item


cdef void _set_splits(RowCall* call, Index splits) noexcept:
    call.splits, call.splits_size = splits.data, splits.size


cdef int _set_blocks(RowCall* call, Index starts, Index lengths, Index targets) except -1:
    """Blocks of rows: a length and a target for each start."""
    if not starts.size == lengths.size == targets.size:
        raise _misplaced()
    call.starts, call.lengths, call.targets, call.blocks = starts.data, lengths.data, targets.data, starts.size
    return 0


cdef RowKernel _kernel(const RowKernel* kernels, np.ndarray x, RowCall* call, bint is_ordered) except NULL:
    """The kernel for the elements of `x`. Signed integers are unsigned ones unless their order matters; a complex number, which
    has no order, is two elements."""
    cdef int64_t size = np.PyArray_ITEMSIZE(x)
    cdef RowKernel found = NULL
    kind = x.dtype.kind
    if kind == "c" and not is_ordered:
        kind, size = "f", size // 2
        call.width *= 2
    if kind == "f" and size >= 4:
        found = kernels[FLOAT + (size == 8)]
    elif kind == "i" or kind == "u":
        found = kernels[(INT8 if is_ordered and kind == "i" else UINT8) + _log2(size)]
    if found is NULL:
        raise InvalidArgumentError(f"there is no row kernel for {x.dtype}")
    return found


cdef int _log2(int64_t size) noexcept nogil:
    return 0 if size == 1 else 1 if size == 2 else 2 if size == 4 else 3


cdef int64_t _word(RowCall* call, int64_t bytes) noexcept:
    """The size of the words that entries of so many bytes consist of, where they lie; `width` then counts words."""
    cdef int64_t size = bytes | <int64_t><size_t>call.values | <int64_t><size_t>call.out | 8
    size &= -size
    call.width = bytes // size
    return size


cdef int64_t _threads(Rows rows) except -1:
    """The threads of torch that help with large tensors."""
    if not rows.is_torch or rows.bytes() <= LOCKED or not (_tensor is not None or _meet_torch()):
        return 0
    return _threads_of_torch()


cdef int _run_rows(RowKernel kernel, RowCall* call, int64_t rows, int64_t bytes, bint is_by_value, int64_t threads) except -1:
    """Run a kernel; raise if the arrays do not fit. Small calls keep the GIL."""
    cdef Outcome outcome
    cdef const int64_t* splits = call.splits if is_by_value else NULL
    if bytes <= LOCKED:
        outcome = run_rows(kernel, call[0], rows, bytes, splits, 0)
    else:
        with nogil:
            outcome = run_rows(kernel, call[0], rows, bytes, splits, threads)
    _check(outcome)
    return 0


cdef int _check(Outcome outcome) except -1:
    if outcome == NO_MEMORY:
        raise MemoryError("there is no room for a row kernel's intermediate results")
    if outcome != DONE:
        raise _misplaced()
    return 0


cdef object _misplaced():
    return InvalidArgumentError(
        "rows must begin and end within the values, and none before it begins: splits, indices and values do not fit "
        "together, or were changed during the call"
    )


# ---- splits and indices

@cython.final
cdef class Integers:
    """An array of int32 or int64 whose memory nobody can resize."""
    cdef np.ndarray array
    cdef object held
    cdef bint is_wide

    def __cinit__(self, x):
        x = numpy.ascontiguousarray(x)
        self.is_wide = np.PyArray_TYPE(<np.ndarray>x) != np.NPY_INT32 or not np.PyArray_ISBEHAVED_RO(<np.ndarray>x)
        self.array = Index(x.reshape(-1)).array if self.is_wide else x
        self.held = hold(self.array)


def all_below(index, int64_t count):
    cdef Integers x = Integers(index)
    return bool(row_kernels().all_below[x.is_wide](np.PyArray_DATA(x.array), np.PyArray_SIZE(x.array), count))


def longest_row(splits):
    cdef Integers x = Integers(splits)
    return row_kernels().longest[x.is_wide](np.PyArray_DATA(x.array), np.PyArray_SIZE(x.array), 0)


def row_bounds(splits, index):
    cdef Index whole = Index(splits), rows = Index(index)
    cdef np.ndarray starts = buffers.empty((rows.size,), numpy.int64), bounds = buffers.empty((rows.size + 1,), numpy.int64)
    cdef RowCall call
    cdef Outcome outcome
    memset(&call, 0, sizeof(call))
    _set_splits(&call, whole)
    call.targets, call.blocks = rows.data, rows.size
    call.made_starts, call.made_splits = <int64_t*>np.PyArray_DATA(starts), <int64_t*>np.PyArray_DATA(bounds)
    with nogil:
        outcome = run_bounds(call, 16 * call.blocks)
    _check(outcome)
    return starts, bounds


def range_rows(starts, steps, splits):
    cdef Rows first = Rows(numpy.array(starts, order="C")), step = Rows(numpy.array(steps, starts.dtype, order="C"))
    cdef Index bounds = _splits_of_result(splits)
    if not first.count == step.count == bounds.size - 1:
        raise _misplaced()
    cdef np.ndarray out = numpy.empty(bounds.data[bounds.size - 1], first.array.dtype)
    cdef RowCall call = first.call(out)
    _set_splits(&call, bounds)
    call.count, call.fill = call.rows, np.PyArray_BYTES(step.array)
    _run_rows(_kernel(row_kernels().range, first.array, &call, False), &call, first.count, np.PyArray_NBYTES(out), True, 0)
    return out


# ---- rows that are moved

def take_rows(values, starts, bounds):
    cdef Rows rows = Rows(values)
    cdef Index first = Index(starts), splits = _splits_of_result(bounds)
    cdef np.ndarray out = rows.room(splits.data[splits.size - 1])
    if splits.size != first.size + 1:
        raise _misplaced()
    cdef RowCall call = rows.call(out)
    _set_splits(&call, splits)
    call.starts, call.width = first.data, rows.width * rows.item
    if np.PyArray_SIZE(out):
        _run_rows(row_kernels().take, &call, first.size, np.PyArray_NBYTES(out), True, _threads(rows))
    return rows.in_library(out)


cdef np.ndarray _pattern(Rows rows, default):
    """One entry of `default`."""
    cdef np.ndarray fill = numpy.empty((<object>rows.array).shape[1:], rows.array.dtype)
    (<object>fill)[...] = Rows(default.reshape((1, *default.shape))).array[0] if library_of(default) == "torch" else default
    return fill


cdef int64_t _fill_width(const char* pattern, int64_t bytes, int64_t word) noexcept:
    """1 if all words of a pattern are the same, else how many there are."""
    cdef int64_t i
    for i in range(word, bytes):
        if pattern[i] != pattern[i - word]:
            return bytes // word
    return 1


cdef int64_t _product(int64_t rows, int64_t columns) except -1:
    if rows < 0 or columns < 0 or (columns > 0 and rows > INT64_MAX // columns):
        raise _misplaced()
    return rows * columns


def pad_rows(values, default, splits, int64_t rows, int64_t columns):
    cdef Rows source = Rows(values)
    cdef Index bounds = Index(splits)
    cdef np.ndarray out, fill = _pattern(source, default)
    cdef int64_t entry = source.width * source.item, word, count
    cdef RowCall call
    out = source.room(_product(rows, columns))
    if np.PyArray_SIZE(out) == 0:
        return source.in_library(out)
    call = source.call(out)
    word = _word(&call, entry)
    if _fill_width(np.PyArray_BYTES(fill), entry, word) != 1:
        count = min(bounds.size - 1, rows)
        lengths = numpy.minimum(numpy.diff(bounds.array[:count + 1]), columns)
        return place_rows(values, default, bounds.array[:count], lengths, numpy.arange(count) * columns, rows * columns)
    if bounds.size < 1:
        raise _misplaced()
    _set_splits(&call, bounds)
    call.columns, call.fill = columns * call.width, np.PyArray_BYTES(fill)
    _run_rows(row_kernels().pad[_log2(word)], &call, rows, np.PyArray_NBYTES(out), False, _threads(source))
    return source.in_library(out)


def place_rows(values, default, starts, lengths, targets, int64_t rows):
    cdef Rows source = Rows(values)
    cdef np.ndarray out = source.room(rows), fill = _pattern(source, default)
    cdef RowCall call = source.call(out)
    cdef Index first = Index(starts), length = Index(lengths), target = Index(targets)
    cdef int64_t word, entry = source.width * source.item
    cdef Outcome outcome
    if np.PyArray_SIZE(out) == 0:
        return source.in_library(out)
    _set_blocks(&call, first, length, target)
    word = _word(&call, entry)
    call.fill, call.fill_width = np.PyArray_BYTES(fill), _fill_width(np.PyArray_BYTES(fill), entry, word)
    with nogil:
        outcome = row_kernels().place_in_order[_log2(word)](call, 0, 0)
    if outcome == OUT_OF_ORDER:
        (<object>out)[...] = fill
        call.width = entry
        with nogil:
            outcome = row_kernels().place(call, 0, 0)
    _check(outcome)
    return source.in_library(out)


def add_rows(values, starts, lengths, targets, int64_t rows):
    cdef Rows source = Rows(values)
    cdef np.ndarray out = source.room(rows)
    cdef RowCall call = source.call(out)
    cdef Index first = Index(starts), length = Index(lengths), target = Index(targets)
    cdef Outcome outcome
    cdef RowKernel kernel = _kernel(row_kernels().add, source.array, &call, False)
    _set_blocks(&call, first, length, target)
    memset(call.out, 0, np.PyArray_NBYTES(out))
    with nogil:
        outcome = kernel(call, 0, 0)
    _check(outcome)
    return source.in_library(out)


def copy(np.ndarray out, np.ndarray rows):
    """Copy `rows` to `out`, on several threads if they are large; False, and nothing is copied, unless both lie in one piece and
    are of one size and dtype."""
    cdef char* to = np.PyArray_BYTES(out)
    cdef const char* source = np.PyArray_BYTES(rows)
    cdef int64_t bytes = np.PyArray_NBYTES(out)
    if not (
        np.PyArray_IS_C_CONTIGUOUS(out) and np.PyArray_IS_C_CONTIGUOUS(rows) and np.PyArray_NBYTES(rows) == bytes
        and out.dtype == rows.dtype and not out.dtype.hasobject and (<object>out).flags.writeable
    ):
        return False
    held = hold(out), hold(rows)
    if not (
        to == np.PyArray_BYTES(out) and source == np.PyArray_BYTES(rows)
        and np.PyArray_NBYTES(out) == bytes and np.PyArray_NBYTES(rows) == bytes
    ):
        return False
    with nogil:
        _copy(to, source, bytes)
    return True


# ---- rows that are reduced

cdef object _reduced(object values, object splits, const RowKernel* kernels, bint is_ordered):
    cdef Rows rows = Rows(values)
    cdef Index bounds = _splits_of(splits)
    cdef np.ndarray out = rows.room(bounds.size - 1)
    cdef RowCall call = rows.call(out)
    cdef RowKernel kernel = _kernel(kernels, rows.array, &call, is_ordered)
    _set_splits(&call, bounds)
    if np.PyArray_SIZE(out):
        _run_rows(kernel, &call, bounds.size - 1, rows.bytes(), True, _threads(rows))
    return rows.in_library(out)


def row_sum(values, splits):
    return _reduced(values, splits, row_kernels().sum, False)


def row_max(values, splits):
    return _reduced(values, splits, row_kernels().max, True)


def row_softmax(values, splits):
    cdef Rows rows = Rows(values)
    cdef Index bounds = _splits_of(splits)
    cdef np.ndarray out = rows.room(rows.count)
    cdef RowCall call = rows.call(out)
    cdef RowKernel kernel = _kernel(row_kernels().softmax, rows.array, &call, True)
    if bounds.data[bounds.size - 1] != rows.count or bounds.data[0] != 0:  # what no row covers would not be written
        raise _misplaced()
    _set_splits(&call, bounds)
    if np.PyArray_SIZE(out):
        _run_rows(kernel, &call, bounds.size - 1, 4 * rows.bytes(), True, _threads(rows))
    return rows.in_library(out)


def set_part_bytes(int64_t count):
    """Give a thread at least so many bytes of a row kernel's work."""
    _set_part_bytes(count)
