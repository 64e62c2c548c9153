"""Threads that help a kernel without ever taking the GIL.

A kernel calls `share` with a function that divides its work among all threads that call it, by atomic counters, and
returns when there is none left. The kernel's own thread calls it too, so it never waits for a free thread, only for
work that has begun; while they help another kernel it works alone. The threads are started when they are first needed,
are as many as the pool has (`pool.resize`), daemons, and do not outlive a fork.

All of it happens without the GIL: a thread that woke up with the GIL in other hands would wait for it longer than most
kernels run. Waking a thread takes 20 us and more, as long as a kernel of 1 MB runs, so one that has nothing to do first
watches the board for some 0.2 ms, letting others have its core in between, and only then sleeps.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..core.fork import on_fork_in_child
from . import PROCESS, pool
from .disk_cache import cached_jit
from .simd import advance, jit, pointer_to

#: How often a thread looks at the board before it sleeps.
LOOKS = 500

# The board's counters, each on a cache line of its own: whether a kernel has the board, whether work is to be had, for
# how many threads, how many are inside; what to call, and with what; whether the threads are to end; or else a function
# that runs others on threads of its own. Then for each thread whether it sleeps, on which lock, its number in the
# system, and from the second line on two sets of cores.
_TAKEN, _OPEN, _PLACES, _INSIDE, _ENTRY, _ARGUMENTS, _END, _RUNNER, _FIRST = range(0, 72, 8)
_LOCK, _NUMBER, _ALLOWED, _ELSEWHERE, _ROW = 1, 2, 8, 24, 40


# ---- without the GIL


@intrinsic
def add(typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """The value of a counter, to which `amount` is then added, whoever else does the same at the same time."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(counters, types.int64, types.int64), generate


@intrinsic
def _swap(typing: Any, counters: Any, index: Any, value: Any) -> Any:
    """The value of a counter, which is `value` then."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(counters, types.int64, types.int64), generate


@intrinsic
def see(typing: Any, counters: Any, index: Any) -> Any:
    """The value of a counter, and all that was written before it got that value."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "seq_cst", 8)

    return types.int64(counters, types.int64), generate


#: Let another thread have the core.
give_way: Any = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())

# Python's own locks, which need no GIL.
_acquire: Any = types.ExternalFunction("PyThread_acquire_lock", types.int32(types.intp, types.int32))
_release: Any = types.ExternalFunction("PyThread_release_lock", types.void(types.intp))


def entry_of(function: Any) -> Any:
    """For use in kernels: given a tuple of arguments, the address of a C function that calls `function` with such a
    tuple, whose address it is given."""

    @intrinsic
    def entry(typing: Any, arguments: Any) -> Any:
        called = types.Dispatcher(function).get_call_type(typing, tuple(arguments), {})

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            compiled = function.get_compile_result(called)
            context.active_code_library.add_linking_library(compiled.library)
            found = ir.Function(builder.module, _C_FUNCTION, builder.module.get_unique_name("entry"))
            found.linkage = "internal"
            inner = ir.IRBuilder(found.append_basic_block())
            packed = inner.load(inner.bitcast(found.args[0], args[0].type.as_pointer()))
            target = context.declare_function(builder.module, compiled.fndesc)
            values = cgutils.unpack_tuple(inner, packed, len(called.args))
            context.call_conv.call_function(inner, target, called.return_type, called.args, values)
            inner.ret_void()
            return builder.ptrtoint(found, ir.IntType(64))

        return types.int64(arguments), generate

    return entry


_ANY = ir.IntType(8).as_pointer()
_C_FUNCTION = ir.FunctionType(ir.VoidType(), [_ANY])


@intrinsic
def _address(typing: Any, arguments: Any) -> Any:
    """Where a tuple lies on the stack of the calling function."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, args[0]), ir.IntType(64))

    return types.int64(arguments), generate


if sys.platform == "linux":
    # A thread that is woken may be put behind the one that woke it, on the same core, and wait there for milliseconds
    # beside an idle one. So it is told to come up elsewhere.
    _AFFINITY = types.int32(types.int32, types.intp, types.CPointer(types.int64))
    _core: Any = types.ExternalFunction("sched_getcpu", types.int32())
    _get_cores: Any = types.ExternalFunction("sched_getaffinity", _AFFINITY)
    _set_cores: Any = types.ExternalFunction("sched_setaffinity", _AFFINITY)

    @jit
    def _know_cores(counters, thread):
        _get_cores(0, 128, advance(counters, thread + _ALLOWED))

    @jit
    def _leave_core(counters, thread):
        """Let a sleeping thread come up on any core but that of the caller."""
        core = _core()
        for i in range(16):
            counters[thread + _ELSEWHERE + i] = counters[thread + _ALLOWED + i]
        counters[thread + _ELSEWHERE + core // 64] &= ~(1 << (core % 64))
        _set_cores(counters[thread + _NUMBER], 128, advance(counters, thread + _ELSEWHERE))

    @jit
    def _any_core(counters, thread):
        _set_cores(0, 128, advance(counters, thread + _ALLOWED))
else:

    @jit
    def _know_cores(counters, thread):
        pass

    _leave_core = _any_core = _know_cores


@intrinsic
def _call(typing: Any, entry: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        entry = builder.inttoptr(args[0], _C_FUNCTION.as_pointer())
        builder.call(entry, [builder.inttoptr(args[1], _ANY)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _run(typing: Any, runner: Any, entry: Any, arguments: Any, threads: Any) -> Any:
    """Have a runner call the function behind an entry on so many threads."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        flags = ir.Constant(ir.IntType(32), 0)
        threads = builder.trunc(args[3], flags.type)
        entry, packed = (builder.inttoptr(args[i], kind) for i, kind in ((1, _C_FUNCTION.as_pointer()), (2, _ANY)))
        kind = ir.FunctionType(ir.VoidType(), [entry.type, _ANY, flags.type, flags.type])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [entry, packed, threads, flags])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@jit
def share(board, helpers, entry, arguments):
    """Call the function behind an entry, on `helpers` more threads too, and return when all have returned."""
    packed, counters = _address(arguments), pointer_to(board)
    if helpers > 0 and counters[_RUNNER] != 0:
        _run(counters[_RUNNER], entry, packed, helpers + 1)
    elif helpers > 0 and add(counters, _TAKEN, 1) == 0:
        counters[_ENTRY], counters[_ARGUMENTS], counters[_PLACES] = entry, packed, helpers
        add(counters, _OPEN, 1)
        _wake(counters, min(len(board), _FIRST + _ROW * helpers))
        _call(entry, packed)
        add(counters, _OPEN, -1)
        while see(counters, _INSIDE) > 0:
            give_way()
        add(counters, _TAKEN, -1)
    else:
        if helpers > 0:
            add(counters, _TAKEN, -1)
        _call(entry, packed)


@jit
def _wake(counters, stop):
    for thread in range(_FIRST, stop, _ROW):
        if see(counters, thread) == 1 and _swap(counters, thread, 0) == 1:
            _leave_core(counters, thread)
            _release(counters[thread + _LOCK])


@cached_jit(nogil=True)
def _dismiss(board):
    add(pointer_to(board), _END, 1)
    _wake(pointer_to(board), len(board))


@cached_jit(nogil=True)
def _work(board, thread, looks):
    """Take part in all that is shared on the board, and sleep when there was nothing for so many looks."""
    counters, left = pointer_to(board), looks
    _know_cores(counters, thread)
    while see(counters, _END) == 0:
        if see(counters, _OPEN) > 0 and see(counters, _PLACES) > 0:
            add(counters, _INSIDE, 1)
            # Once inside, what is open stays so: who opened it waits until nobody is inside.
            if see(counters, _OPEN) > 0 and add(counters, _PLACES, -1) > 0:
                _call(counters[_ENTRY], counters[_ARGUMENTS])
                left = looks
            add(counters, _INSIDE, -1)
        if left > 0:
            left -= 1
            give_way()
        else:
            _swap(counters, thread, 1)
            if see(counters, _END) == 0:
                _acquire(counters[thread + _LOCK], 1)
                _any_core(counters, thread)
            left = looks


# ---- with the GIL


class _Team:
    """The threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.board = np.zeros(_FIRST + _ROW * size, np.int64)
        self.lock = threading.Lock()
        self.is_started = False

    def start(self) -> bool:
        """Start the threads; False if another call is doing so, perhaps the one that this call interrupts."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if not self.is_started:
                _work.compile((typeof(self.board), types.int64, types.int64))
                for row in range(_FIRST, len(self.board), _ROW):
                    self.board[row + _LOCK] = _new_lock()
                    threading.Thread(target=self.serve, args=(row,), name="weft-kernels", daemon=True).start()
                self.is_started = True
        finally:
            self.lock.release()
        return True

    def serve(self, row: int) -> None:
        self.board[row + _NUMBER] = threading.get_native_id()
        _work(self.board, row, LOOKS)

    def end(self) -> None:
        _dismiss(self.board)


def _new_lock() -> int:
    """The address of a lock that is held."""
    python = ctypes.pythonapi
    python.PyThread_allocate_lock.restype = ctypes.c_void_p
    lock = ctypes.c_void_p(python.PyThread_allocate_lock())
    python.PyThread_acquire_lock(lock, 1)
    return lock.value or 0


_team = _Team(0)


def board(helpers: int) -> np.ndarray:
    """What a kernel hands to `share` to have that many helpers, of which there may be one less than `pool.size()`."""
    global _team
    team = _team
    if helpers > 0:
        if team.size != pool.size() - 1:
            team.end()
            team = _team = _Team(pool.size() - 1)
        if not team.is_started and not team.start():
            return _Team(0).board  # this once without helpers
    return team.board


@cache
def torchs_board() -> np.ndarray | None:
    """What a kernel hands to `share` to have torch's OpenMP threads for helpers; None where torch has none.

    For a while after each operation they wait for the next without giving way, on every core: among them, threads of our
    own make a kernel slower, not faster.
    """
    if os.getpid() != PROCESS:  # a call for threads of OpenMP that stayed behind in a fork would never return
        return None
    try:
        from ..core.torch_internals import extension_file

        runner = ctypes.CDLL(extension_file()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    board = np.zeros(_FIRST, np.int64)
    board[_RUNNER] = ctypes.cast(runner, ctypes.c_void_p).value or 0
    return board


def _after_fork() -> None:
    """A forked child has none of the threads, and perhaps a board or a lock that one of them held."""
    global _team
    _team = _Team(0)
    torchs_board.cache_clear()


on_fork_in_child(_after_fork)
