"""How compiled kernels are launched, with functions in the place of CUDA's driver: no device is needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import ClassVar

import pytest
from support.libraries import need

need("torch")
need("triton")

GRID, STREAM = (5, 6, 1), 7
FUNCTION = 11
TYPES = {
    "x": "*fp32",
    "y": "*i64",
    "mask": "constexpr",
    "epsilon": "fp32",
    "rows": "i32",
    "large": "i64",
    "WIDE": "constexpr",
}
SIZES = [8, 8, 4, 4, 8]


def launch_type(is_cooperative):
    places = [ctypes.POINTER(ctypes.c_void_p)] if is_cooperative else [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, *places)


class Driver:
    """Notes the launches. `sizes` are those of a kernel's parameters, `error` is what a launch returns."""

    def __init__(self, sizes, error=0):
        self.launched = []

        def info(function, index, offset, size):
            if index >= len(sizes):
                return 1
            size[0] = sizes[index]
            return 0

        def launch(function, *rest):
            *numbers, stream, places = rest[:9]
            kinds = [ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int32, ctypes.c_int64]
            kinds += [ctypes.c_int64] * (len(sizes) - len(SIZES))
            values = [ctypes.cast(places[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(kinds)]
            self.launched.append((len(rest) == 9, function, tuple(numbers), stream, values))
            return error

        size = ctypes.POINTER(ctypes.c_size_t)
        self.cuFuncGetParamInfo = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, size, size)(info)
        self.cuLaunchKernel = launch_type(False)(launch)
        self.cuLaunchCooperativeKernel = launch_type(True)(launch)


class Compiled:
    """A kernel as Triton compiles it."""

    function, packed_metadata = FUNCTION, (4, 1)

    def __init__(self, types=TYPES, **metadata):
        self.launched = []
        self.src = SimpleNamespace(signature=types)
        self.metadata = SimpleNamespace(**{"num_warps": 4, "warp_size": 32, "shared": 96, "num_ctas": 1} | metadata)

    def run(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture
def launched_by(monkeypatch):
    """What a launch of a compiled kernel by a driver gives: the launches of the driver, and those of Triton."""
    need("weft._native")
    from weft.kernels import cuda_launch

    def launched_by(driver, compiled, tensors, numbers=(0.5, 3, 1 << 40)):
        monkeypatch.setattr(cuda_launch, "_driver", lambda: driver)
        cuda_launch.launcher_of(compiled, (True,))(GRID, STREAM, tensors, numbers)
        return driver.launched, compiled.launched

    return launched_by


@pytest.fixture
def tensors():
    import torch

    x = torch.arange(6.0)
    return x[2:], torch.nn.Parameter(x), None


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("is_cooperative", [False, True])
def test_the_driver_gets_the_arguments(launched_by, tensors, is_cooperative, more):
    driver = Driver(SIZES + [8] * more)
    direct, others = launched_by(driver, Compiled(launch_cooperative_grid=is_cooperative), tensors)
    values = [tensors[0].data_ptr(), tensors[1].data_ptr(), 0.5, 3, 1 << 40] + [0] * more
    assert direct == [(is_cooperative, FUNCTION, (*GRID, 128, 1, 1, 96), STREAM, values)]
    assert not others


def by_triton(tensors, numbers=(0.5, 3, 1 << 40)):
    addresses = [x if x is None else x.data_ptr() for x in tensors]
    return [(*GRID, STREAM, FUNCTION, Compiled.packed_metadata, None, None, None, *addresses, *numbers, True)]


def test_triton_launches_what_the_driver_refuses(launched_by, tensors):
    direct, others = launched_by(Driver(SIZES, error=201), Compiled(), tensors)
    assert len(direct) == 1
    assert others == by_triton(tensors)


@pytest.mark.parametrize(
    ("sizes", "metadata"),
    [
        (SIZES[:-1], {}),
        ([8, 8, 8, 4, 8], {}),
        ([*SIZES, 4], {}),
        (SIZES, {"num_ctas": 2}),
        (SIZES, {"launch_pdl": True}),
        (SIZES, {"global_scratch_size": 128}),
        (SIZES, {"types": TYPES | {"rows": "i8"}}),
    ],
)
def test_triton_launches_kernels_of_another_form(launched_by, tensors, sizes, metadata):
    direct, others = launched_by(Driver(sizes), Compiled(**metadata), tensors)
    assert not direct
    assert others == by_triton(tensors)


def test_a_subclass_of_a_tensor_goes_by_triton(launched_by, tensors):
    import torch

    class Other(torch.Tensor):
        pass

    tensors = (tensors[0].as_subclass(Other), *tensors[1:])
    direct, others = launched_by(Driver(SIZES), Compiled(), tensors)
    assert not direct
    assert others == by_triton(tensors)


def test_wrong_arguments_of_the_native_launch():
    need("weft._native")
    import torch

    from weft import _native

    with pytest.raises(ValueError, match="takes at most 40 parameters"):
        _native.CudaKernel(1, 1, b"p" * 40, 1, 32, 0, False)
    with pytest.raises(ValueError, match="of the kinds"):
        _native.CudaKernel(1, 1, b"px", 0, 32, 0, False)
    kernel = _native.CudaKernel(1, 1, b"p", 0, 32, 0, False)  # which would crash if it were launched
    for tensors in ((), (torch.ones(1), torch.ones(1)), (None,), (1024,), (torch.eye(2).to_sparse(),)):
        assert not kernel(GRID, STREAM, tensors, ())


def test_a_launch_without_tritons_wrapper_is_the_same():
    import torch
    from triton.compiler import CompiledKernel

    from weft.kernels.cuda_launch import launcher_of

    class Wrapped(Compiled):
        launched: ClassVar[list] = []

        def _init_handles(self):
            pass

        def launch_metadata(self, grid, stream, *arguments):
            return None

    compiled, x = Wrapped({}), torch.ones(3)
    CompiledKernel.__getitem__(compiled, GRID)(x.data_ptr(), None, 0.5, 3, True, stream=STREAM)
    launcher_of(compiled, (True,))(GRID, STREAM, (x, None), (0.5, 3))
    wrapped, direct = compiled.launched
    hooks = slice(7, 9)
    assert wrapped[: hooks.start] == direct[: hooks.start]
    assert wrapped[hooks.stop :] == direct[hooks.stop :] == (x.data_ptr(), None, 0.5, 3, True)
    assert direct[hooks] == (None, None)
    assert launcher_of(object(), ()) is None
