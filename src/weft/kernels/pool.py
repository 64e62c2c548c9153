"""A small pool of threads for kernels that run without the GIL.

A kernel calls `share` with a function that divides its work among all threads that call it, by atomic counters, and
returns when there is none left. The kernel's own thread calls it too, so it never waits for a free thread, only for
work that has begun; when the pool is taken by another kernel it works alone. The threads are started when they are first
needed, are daemons, and do not outlive a fork.

Waking a thread takes 20 us and more, as long as a kernel of 1 MB runs, and so does waiting for the GIL. So a thread
that has nothing to do first watches the board for some 0.2 ms, letting others have its core in between, and takes its
work from there: all without the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import jit, pointer_to

#: How often a thread looks at the board before it sleeps.
LOOKS = 500

# The board's counters, each on a cache line of its own: whether a kernel has the board, whether work is to be had,
# for how many threads, how many are inside, how many watch; what to call, and with what.
_TAKEN, _OPEN, _PLACES, _INSIDE, _WATCHING, _ENTRY, _ARGUMENTS = range(0, 56, 8)


# ---- without the GIL


@intrinsic
def add(typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """The value of a counter, to which `amount` is then added, whoever else does the same at the same time."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(counters, types.int64, types.int64), generate


@intrinsic
def see(typing: Any, counters: Any, index: Any) -> Any:
    """The value of a counter, and all that was written before it got that value."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "seq_cst", 8)

    return types.int64(counters, types.int64), generate


#: Let another thread have the core.
give_way: Any = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


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


_C_FUNCTION = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])


@intrinsic
def _address(typing: Any, arguments: Any) -> Any:
    """Where a tuple lies on the stack of the calling function."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, args[0]), ir.IntType(64))

    return types.int64(arguments), generate


@intrinsic
def _call(typing: Any, entry: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        entry = builder.inttoptr(args[0], _C_FUNCTION.as_pointer())
        builder.call(entry, [builder.inttoptr(args[1], ir.IntType(8).as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@jit
def share(board, helpers, entry, arguments):
    """Call the function behind an entry, on `helpers` more threads too, and return when all have returned."""
    packed = _address(arguments)
    if helpers == 0 or add(board, _TAKEN, 1) > 0:
        _call(entry, packed)
    else:
        board[_ENTRY], board[_ARGUMENTS], board[_PLACES] = entry, packed, helpers
        add(board, _OPEN, 1)
        _call(entry, packed)
        add(board, _OPEN, -1)
        while see(board, _INSIDE) > 0:
            give_way()
    if helpers > 0:
        add(board, _TAKEN, -1)


@njit(nogil=True, cache=True)
def _work(board, looks):
    """Take part in all that is shared on the board, until there was nothing for so many looks."""
    counters, left = pointer_to(board), looks
    add(counters, _WATCHING, 1)
    while left > 0:
        if see(counters, _OPEN) > 0 and see(counters, _PLACES) > 0:
            add(counters, _INSIDE, 1)
            # Once inside, what is open stays so: who opened it waits until nobody is inside.
            if see(counters, _OPEN) > 0 and add(counters, _PLACES, -1) > 0:
                _call(counters[_ENTRY], counters[_ARGUMENTS])
                left = looks
            add(counters, _INSIDE, -1)
        give_way()
        left -= 1
    add(counters, _WATCHING, -1)


# ---- with the GIL


class _Threads:
    """The workers of this process."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or _cores()
        self.board = np.zeros(64, np.int64)
        self.calls: SimpleQueue[bool] = SimpleQueue()  # one to wake a thread, False to end it
        self.started = 0
        self.lock = threading.Lock()

    def wake(self, count: int) -> None:
        """Have `count` threads watch the board, as far as it is known now."""
        with self.lock:
            while self.started < count:
                self.started += 1
                threading.Thread(target=self.serve, name=f"weft-{self.started}", daemon=True).start()
        for _ in range(count - int(self.board[_WATCHING])):
            self.calls.put(True)

    def serve(self) -> None:
        while self.calls.get():
            _work(self.board, LOOKS)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_threads = _Threads()


def board(helpers: int) -> np.ndarray:
    """What a kernel hands to `share`, with up to `helpers` threads about to look at it."""
    threads = _threads
    helpers = min(helpers, threads.size - 1)
    if threads.board[_WATCHING] < helpers:
        threads.wake(helpers)
    return threads.board


def size() -> int:
    """How many threads a kernel runs on, the caller's included."""
    return _threads.size


def resize(count: int) -> None:
    """Run on `count` threads from now on; workers that this leaves over end."""
    global _threads
    if count < 1:
        raise ValueError(f"a pool needs at least 1 thread, got {count}")
    old, _threads = _threads, _Threads(count)
    for _ in range(old.started):
        old.calls.put(False)


def _after_fork() -> None:
    """A forked child has none of the threads, and perhaps a board or a lock that one of them held."""
    global _threads
    _threads = _Threads(_threads.size)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
