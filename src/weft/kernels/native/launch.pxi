# Launches of compiled CUDA kernels by the functions of CUDA's driver, with tensors as pointers. Included by module.pyx.

cdef enum:
    PARAMETERS = 40  # of a kernel, at most

ctypedef int (*_launch_kernel)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**
) noexcept nogil
ctypedef int (*_launch_together)(
    void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**
) noexcept nogil

cdef union Parameter:
    void* pointer
    int32_t int32
    int64_t int64
    float float32


@cython.no_gc
@cython.final
cdef class CudaKernel:
    """A compiled kernel, launched by the driver's cuLaunchKernel or, if all programs must run together, cuLaunchCooperativeKernel.

    `launch` is the address of that function. `kinds` has a letter for each argument of a call: "p" for a tensor, "i" and "l" for
    an integer of 32 and 64 bits, "f" for a float32, "-" for what the kernel does not take. `more` null pointers follow.
    """
    cdef void* launch
    cdef void* function
    cdef bytes kinds
    cdef unsigned threads, memory
    cdef int count
    cdef bint is_cooperative

    def __init__(self, size_t launch, size_t function, bytes kinds, int more, unsigned threads, unsigned memory, bint is_cooperative):
        self.launch, self.function, self.kinds = <void*>launch, <void*>function, kinds
        self.threads, self.memory, self.is_cooperative = threads, memory, is_cooperative
        self.count = len(kinds) - kinds.count(b"-") + more
        if self.count > PARAMETERS or kinds.strip(b"pilf-"):
            raise ValueError(f"a kernel takes at most {PARAMETERS} parameters of the kinds p, i, l and f, got {kinds!r} and {more}")

    def __call__(self, tuple grid, size_t stream, tuple tensors, tuple numbers):
        """True if the kernel was launched with these arguments, `tensors` first; if not, nothing has run."""
        cdef Parameter values[PARAMETERS]
        cdef void* places[PARAMETERS]
        cdef weft_dl_tensor tensor
        cdef unsigned x = grid[0], y = grid[1], z = grid[2]
        cdef const char* kinds = self.kinds
        cdef Py_ssize_t i, split = len(tensors)
        cdef int k = 0, error
        if split + len(numbers) != len(self.kinds) or _exchange is NULL and not _meet_torch():
            return False
        for i in range(len(self.kinds)):
            if kinds[i] == c"-":
                continue
            value = tensors[i] if i < split else numbers[i - split]
            if kinds[i] == c"p":
                if _exchange is NULL or type(value) is not _tensor and type(value) is not _parameter:
                    return False
                try:
                    _exchange.look(<void*>value, &tensor)
                except RuntimeError:  # it has no memory of its own
                    return False
                values[k].pointer = <char*>tensor.data + tensor.byte_offset
            elif kinds[i] == c"f":
                values[k].float32 = value
            elif kinds[i] == c"i":
                values[k].int32 = value
            else:
                values[k].int64 = value
            k += 1
        while k < self.count:
            values[k].pointer = NULL
            k += 1
        for k in range(self.count):
            places[k] = &values[k]
        with nogil:  # the driver waits where the device is far behind
            if self.is_cooperative:
                error = (<_launch_together>self.launch)(
                    self.function, x, y, z, self.threads, 1, 1, self.memory, <void*>stream, places
                )
            else:
                error = (<_launch_kernel>self.launch)(
                    self.function, x, y, z, self.threads, 1, 1, self.memory, <void*>stream, places, NULL
                )
        return error == 0
