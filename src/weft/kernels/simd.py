"""Vectors of 16 numbers for Numba.

Numba vectorizes loops only as far as LLVM can prove that arrays do not overlap and that sums may be reordered; and it
has no half precision on the CPU. Here the vectors are explicit: `load` reads 16 elements of a float64, float32,
float16 (viewed as int16) or bfloat16 (viewed as uint16) array as float64 or float32, `store` rounds once and writes
them back, `+ - * /` work lane by lane, and LLVM maps the 16 lanes to whatever registers there are. `load_part` and
`store_part` are for the end of an array.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

#: For functions that are called from others only; `driver`, in drivers.py, is for those called from Python.
jit: Any = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

LANES = 16

_I16, _I32 = ir.IntType(16), ir.IntType(32)


class Vector(types.Type):
    """The Numba type of 16 float32 or float64 numbers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _lanes(ir.DoubleType() if kind.dtype == types.float64 else ir.FloatType()))


def _lanes(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def _vector_of(pointer: Any) -> Any:
    """The vector type that the elements behind a pointer are computed in."""
    dtype = pointer.dtype if isinstance(pointer, types.CPointer) else None
    if dtype in (types.float64, types.float32):
        return Vector(dtype)
    return Vector(types.float32) if dtype in (types.int16, types.uint16) else None


_FLOAT_OPERATIONS = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}


def _define(function: Any, instruction: str) -> None:
    @infer_global(function)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and args[0] == args[1] and isinstance(args[0], Vector):
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _function, _instruction in _FLOAT_OPERATIONS.items():
    _define(_function, _instruction)


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once where the processor does so in one step, else twice.

    One step leaves the units that only add, which bind the sums, with two additions of three.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.fmuladd.v{LANES}f{sig.return_type.dtype.bitwidth}"
        kind = ir.FunctionType(args[0].type, [args[0].type] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return a(a, a, a), generate


def _place(context: Any, builder: Any, kind: Any, pointer: Any, index: Any) -> tuple[Any, Any, int]:
    """Where element `index` is, as a pointer to a vector, with the vector's type and the alignment."""
    stored = context.get_data_type(kind.dtype)
    vector = _lanes(stored)
    return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer()), vector, context.get_abi_sizeof(stored)


def _mask(builder: Any, count: Any) -> Any:
    """Which of the lanes are below `count`."""
    kind = _lanes(ir.IntType(64))
    every = builder.insert_element(ir.Constant(kind, ir.Undefined), count, ir.Constant(_I32, 0))
    zeros = ir.Constant(_lanes(_I32), [0] * LANES)
    every = builder.shuffle_vector(every, ir.Constant(kind, ir.Undefined), zeros)
    return builder.icmp_signed("<", ir.Constant(kind, list(range(LANES))), every)


def _widen(builder: Any, value: Any, kind: Any) -> Any:
    if kind == types.int16:
        return builder.fpext(builder.bitcast(value, _lanes(ir.HalfType())), _lanes(ir.FloatType()))
    if kind == types.uint16:  # bfloat16 is the upper half of a float32
        wide = builder.zext(value, _lanes(_I32))
        return builder.bitcast(builder.shl(wide, ir.Constant(_lanes(_I32), [16] * LANES)), _lanes(ir.FloatType()))
    return value


def _narrow(builder: Any, value: Any, kind: Any) -> Any:
    """`value` rounded to the nearest, ties to even."""
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(value, _lanes(ir.HalfType())), _lanes(_I16))
    if kind != types.uint16:
        return value

    def every(number: int) -> Any:
        return ir.Constant(_lanes(_I32), [number] * LANES)

    bits = builder.bitcast(value, _lanes(_I32))
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
    quiet = builder.or_(bits, every(0x400000))  # rounding could carry a NaN into infinity
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, every(16)), _lanes(_I16))


def _masked(builder: Any, name: str, stored: Any, result: Any, arguments: list[Any]) -> Any:
    """A call of LLVM's masked load or store, under the name it has for the element type."""
    element = {"double": "f64", "float": "f32"}.get(str(stored.element), str(stored.element))
    kind = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.v{LANES}{element}.p0")
    return builder.call(function, arguments)


@intrinsic
def pointer_to(typing: Any, array: Any) -> Any:
    """A pointer to an array's first element. Pointers are not counted, so that a loop over them is only a loop."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def pointers_to(typing: Any, arrays: Any) -> Any:
    """`pointer_to` each array of a tuple."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        each = cgutils.unpack_tuple(builder, args[0], len(sig.args[0]))
        data = [
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(sig.args[0], each, strict=True)
        ]
        return context.make_tuple(builder, sig.return_type, data)

    return types.Tuple([types.CPointer(array.dtype) for array in arrays])(arrays), generate


@intrinsic
def advance(typing: Any, pointer: Any, count: Any) -> Any:
    """A pointer `count` elements further on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


@intrinsic
def address_of(typing: Any, pointer: Any) -> Any:
    """Where a pointer points to."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), generate


@intrinsic
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """16 elements from `index` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, _, size = _place(context, builder, sig.args[0], *args)
        return _widen(builder, builder.load(at, align=size), sig.args[0].dtype)

    found = _vector_of(pointer)
    return None if found is None else (found(pointer, types.int64), generate)


@intrinsic
def load_part(typing: Any, pointer: Any, index: Any, count: Any, rest: Any) -> Any:
    """`count` elements from `index` on, in the other lanes what the vector `rest` has there."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, vector, size = _place(context, builder, sig.args[0], *args[:2])
        mask = _mask(builder, args[2])
        arguments = [at, ir.Constant(_I32, size), mask, ir.Constant(vector, None)]
        value = _widen(builder, _masked(builder, "load", vector, vector, arguments), sig.args[0].dtype)
        return builder.select(mask, value, args[3])

    found = _vector_of(pointer)
    return None if found is None else (found(pointer, types.int64, types.int64, found), generate)


@intrinsic
def store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write 16 elements from `index` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, _, size = _place(context, builder, sig.args[0], *args[:2])
        builder.store(_narrow(builder, args[2], sig.args[0].dtype), at, align=size)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value), generate


@intrinsic
def store_past(typing: Any, pointer: Any, index: Any, value: Any, past: Any) -> Any:
    """Write 16 elements from `index` on; where `past` is not 0 the address must be a multiple of their size, and the
    caches, which are not to be filled with them, are passed by."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, _, size = _place(context, builder, sig.args[0], *args[:2])
        narrow = _narrow(builder, args[2], sig.args[0].dtype)
        with builder.if_else(builder.icmp_signed("!=", args[3], ir.Constant(args[3].type, 0))) as (then, otherwise):
            with then:
                written = builder.store(narrow, at, align=size * LANES)
                written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
            with otherwise:
                builder.store(narrow, at, align=size)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value, types.int64), generate


@intrinsic
def settle(typing: Any) -> Any:
    """What was written past the caches is there for all to see from here on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def store_part(typing: Any, pointer: Any, index: Any, value: Any, count: Any) -> Any:
    """Write the first `count` lanes from `index` on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at, vector, size = _place(context, builder, sig.args[0], *args[:2])
        value = _narrow(builder, args[2], sig.args[0].dtype)
        arguments = [value, at, ir.Constant(_I32, size), _mask(builder, args[3])]
        _masked(builder, "store", vector, ir.VoidType(), arguments)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value, types.int64), generate


@intrinsic
def every(typing: Any, value: Any, like: Any) -> Any:
    """A float64 number in all lanes, in the type that the elements behind the pointer `like` are computed in."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = _lanes(context.get_data_type(sig.return_type.dtype))
        number = args[0] if sig.return_type.dtype == types.float64 else builder.fptrunc(args[0], kind.element)
        undefined = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(undefined, number, ir.Constant(_I32, 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(_lanes(_I32), [0] * LANES))

    return _vector_of(like)(types.float64, like), generate


@intrinsic
def rounded(typing: Any, value: Any, like: Any) -> Any:
    """A float64 number as `every` would round it, as float64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _vector_of(sig.args[1]).dtype == types.float64:
            return args[0]
        return builder.fpext(builder.fptrunc(args[0], ir.FloatType()), ir.DoubleType())

    return types.float64(types.float64, like), generate


@intrinsic
def wide(typing: Any, value: Any) -> Any:
    """A vector as float64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        same = sig.args[0] == sig.return_type
        return args[0] if same else builder.fpext(args[0], _lanes(ir.DoubleType()))

    return Vector(types.float64)(value), generate


@intrinsic
def narrow(typing: Any, value: Any, like: Any) -> Any:
    """A float64 vector in the type that the elements behind the pointer `like` are computed in."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        same = sig.args[0] == sig.return_type
        return args[0] if same else builder.fptrunc(args[0], _lanes(ir.FloatType()))

    return _vector_of(like)(value, like), generate


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """The sum of a vector's lanes, added in pairs, in float64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, width = args[0], LANES
        if sig.args[0].dtype != types.float64:
            value = builder.fpext(value, _lanes(ir.DoubleType()))
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(_I32, width), list(range(s, s + width))) for s in (0, width)]
            low, high = (builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), h) for h in halves)
            value = builder.fadd(low, high)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float64(value), generate


@intrinsic
def first_of(typing: Any, value: Any) -> Any:
    """A vector's first lane, as float64."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = builder.extract_element(args[0], ir.Constant(_I32, 0))
        return found if sig.args[0].dtype == types.float64 else builder.fpext(found, ir.DoubleType())

    return types.float64(value), generate


@intrinsic
def root(typing: Any, value: Any) -> Any:
    """The square root of every lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.sqrt.v{LANES}f{sig.return_type.dtype.bitwidth}"
        kind = ir.FunctionType(args[0].type, [args[0].type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return value(value), generate


@intrinsic
def at_least_zero(typing: Any, value: Any) -> Any:
    """A vector with zeros for what is negative; NaN stays."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zeros = ir.Constant(args[0].type, None)
        return builder.select(builder.fcmp_ordered("<", args[0], zeros), zeros, args[0])

    return value(value), generate


@intrinsic
def finite_or(typing: Any, value: Any, other: Any) -> Any:
    """A vector with the lanes of `other` where it is infinite or NaN."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        nothing = builder.fsub(args[0], args[0])
        return builder.select(builder.fcmp_ordered("==", nothing, ir.Constant(nothing.type, None)), *args)

    return value(value, value), generate
