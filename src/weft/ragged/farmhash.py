"""FarmHash's 64-bit fingerprint (farmhashna::Hash64), which TensorFlow hashes strings with."""

from __future__ import annotations

_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_MASK = 0xFFFFFFFFFFFFFFFF


def fingerprint64(s: bytes) -> int:
    """The fingerprint of `s`, an unsigned 64-bit number."""
    size = len(s)
    if size <= 16:
        return _up_to_16(s, size)
    if size <= 32:
        return _up_to_32(s, size)
    return _up_to_64(s, size) if size <= 64 else _longer(s, size)


def _up_to_16(s: bytes, size: int) -> int:
    mul = _K2 + size * 2
    if size >= 8:
        a, b = (_word(s, 0) + _K2) & _MASK, _word(s, size - 8)
        return _mix(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if size >= 4:
        return _mix(size + (_half(s, 0) << 3), _half(s, size - 4), mul)
    if size > 0:
        y, z = s[0] + (s[size >> 1] << 8), size + (s[-1] << 2)
        return _shift_mix((y * _K2 ^ z * _K0) & _MASK) * _K2 & _MASK
    return _K2


def _up_to_32(s: bytes, size: int) -> int:
    mul = _K2 + size * 2
    a, b = _word(s, 0) * _K1, _word(s, 8)
    c, d = _word(s, size - 8) * mul, _word(s, size - 16) * _K2
    return _mix(_rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c, mul)


def _up_to_64(s: bytes, size: int) -> int:
    mul = _K2 + size * 2
    a, b = _word(s, 0) * _K2, _word(s, 8)
    c, d = _word(s, size - 8) * mul, _word(s, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, mul)
    e, f = _word(s, 16) * mul, _word(s, 24)
    g, h = (y + _word(s, size - 32)) * mul, (z + _word(s, size - 24)) * mul
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _longer(s: bytes, size: int) -> int:
    x, y = 81 * _K2 + _word(s, 0), 81 * _K1 + 113
    z = _shift_mix((y * _K2 + 113) & _MASK) * _K2
    v = w = (0, 0)
    for at in range(0, (size - 1) // 64 * 64, 64):
        x, y, z, v, w = _round(s, at, (x, y, z, v, w), _K1, 1)
    mul = _K1 + ((z & 0xFF) << 1)
    first = w[0] + ((size - 1) & 63)
    v = (v[0] + first, v[1])
    w = (first + v[0], w[1])
    x, y, z, v, w = _round(s, size - 64, (x, y, z, v, w), mul, 9)
    left = _mix(v[0], w[0], mul) + _shift_mix(y & _MASK) * _K0 + z
    return _mix(left, _mix(v[1], w[1], mul) + x, mul)


_Pair = tuple[int, int]
_State = tuple[int, int, int, _Pair, _Pair]


def _round(s: bytes, at: int, state: _State, mul: int, weight: int) -> _State:
    """Mix one block of 64 bytes into the state."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + _word(s, at + 8), 37) * mul
    y = _rotate(y + v[1] + _word(s, at + 48), 42) * mul
    x = (x ^ (w[1] * weight)) & _MASK
    y = (y + v[0] * weight + _word(s, at + 40)) & _MASK
    z = _rotate(z + w[0], 33) * mul & _MASK
    v = _weak(s, at, v[1] * mul, x + w[0])
    w = _weak(s, at + 32, z + w[1], y + _word(s, at + 16))
    return z, y, x, v, w


def _weak(s: bytes, at: int, a: int, b: int) -> _Pair:
    w, x, y, z = (_word(s, at + 8 * i) for i in range(4))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    b += _rotate(a, 44)
    return (a + z) & _MASK, (b + c) & _MASK


def _word(s: bytes, at: int) -> int:
    return int.from_bytes(s[at : at + 8], "little")


def _half(s: bytes, at: int) -> int:
    return int.from_bytes(s[at : at + 4], "little")


def _rotate(v: int, by: int) -> int:
    v &= _MASK
    return (v >> by) | (v << (64 - by)) & _MASK


def _shift_mix(v: int) -> int:
    return v ^ (v >> 47)


def _mix(u: int, v: int, mul: int) -> int:
    a = _shift_mix(((u ^ v) & _MASK) * mul & _MASK)
    b = _shift_mix(((v ^ a) & _MASK) * mul & _MASK)
    return b * mul & _MASK
