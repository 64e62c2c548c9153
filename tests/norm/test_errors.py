"""What the fused batch norm ops refuse: every rule of validation, and every attack on record."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.libraries import to

import weft
from weft import errors, raw_ops

X = np.arange(24, dtype=np.float32).reshape(2, 2, 3, 2)
V = np.ones(2, np.float32)
NONE = np.zeros(0, np.float32)
THREE = np.ones(3, np.float32)
FORWARD = ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"]
BACKWARD = ["FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"]


def forward(name, **changes):
    inputs = {"x": X, "scale": V, "offset": V, "mean": V, "variance": V} | changes
    return getattr(raw_ops, name)(**inputs)


def backward(name, **changes):
    inputs = {"y_backprop": X, "x": X, "scale": V, "reserve_space_1": V, "reserve_space_2": V}
    inputs |= {"reserve_space_3": NONE} if name.endswith("V3") else {}
    return getattr(raw_ops, name)(**(inputs | changes))


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": X[0]}, "x must have rank 4 or 5, got the shape \\[2, 3, 2\\]"),
        ({"x": X[None, None]}, "x must have rank 4 or 5"),
        ({"scale": V[None]}, "scale must have rank 1"),
        ({"offset": V[0, ...]}, "offset must have rank 1"),
        ({"mean": V[None]}, "mean must have rank 1"),
        ({"variance": V[0, ...]}, "variance must have rank 1"),
        ({"scale": THREE}, "scale must have one element for each of the 2 channels of x, got 3"),
        ({"scale": NONE}, "scale must have one element"),
        ({"offset": THREE}, "offset must have one element"),
        ({"mean": NONE, "is_training": False}, "mean must have one element"),
        ({"variance": NONE, "is_training": False}, "variance must have one element"),
        ({"mean": NONE, "exponential_avg_factor": 0.5}, "mean must have one element"),
        ({"variance": THREE, "exponential_avg_factor": 0.5}, "variance must have one element"),
        ({"data_format": "NCHW_VECT_C"}, "data_format must be one of NHWC, NCHW"),
        ({"data_format": ""}, "data_format must be one of"),
        ({"x": X.astype(np.int32)}, "x must be one of"),
        ({"x": X.astype(np.complex64)}, "x must be one of"),
        ({"x": X.astype(np.float64)}, "scale must be float64 here, got float32"),
        ({"offset": V.astype(np.float16)}, "offset must be float32 here, got float16"),
        ({"variance": V.astype(np.uint32)}, "variance must be float32 here, got uint32"),
        ({"x": None}, "x must be an array, got None"),
        ({"scale": [[1.0], [1.0, 2.0]]}, "scale must be of a regular shape"),
    ],
)
def test_forward(name, changes, says, library):
    changes = {k: to(library, v) if isinstance(v, np.ndarray) else v for k, v in changes.items()}
    rest = {k: to(library, v) for k, v in {"x": X, "scale": V, "offset": V, "mean": V, "variance": V}.items()}
    if library == "jax" and changes.get("x") is not None and "float64" in says:
        return  # JAX made float32 of it on the way in
    with pytest.raises(errors.InvalidArgumentError, match=says):
        forward(name, **(rest | changes))


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y_backprop": X[0]}, "y_backprop must have rank 4 or 5"),
        ({"x": X[0]}, "x must have rank 4 or 5"),
        ({"y_backprop": X[:1]}, "x and y_backprop must have the same shape"),
        ({"y_backprop": X[..., :1]}, "x and y_backprop must have the same shape"),
        ({"scale": V[0]}, "scale must have rank 1"),
        ({"reserve_space_1": V[None]}, "reserve_space_1 must have rank 1"),
        ({"reserve_space_2": V[0]}, "reserve_space_2 must have rank 1"),
        ({"scale": THREE}, "scale must have one element"),
        ({"scale": NONE}, "scale must have one element"),
        ({"reserve_space_1": THREE}, "reserve_space_1 must have one element"),
        ({"reserve_space_2": THREE}, "reserve_space_2 must have one element"),
        ({"data_format": "CHWN"}, "data_format must be one of"),
        ({"y_backprop": X.astype(np.int64)}, "y_backprop must be one of"),
        ({"x": X.astype(np.float16)}, "x must be float32 here, got float16"),
        ({"scale": V.astype(np.uint32)}, "scale must be float32 here, got uint32"),
    ],
)
def test_backward(name, changes, says):
    with pytest.raises(errors.InvalidArgumentError, match=says):
        backward(name, **changes)


def test_first_versions_take_less():
    with pytest.raises(errors.InvalidArgumentError, match="x must be one of float32, float64"):
        forward("FusedBatchNorm", x=X.astype(np.float16))
    for name in ("FusedBatchNorm", "FusedBatchNormV2"):
        with pytest.raises(errors.InvalidArgumentError, match="data_format"):
            forward(name, x=X[:, None], data_format="NDHWC")
    for name in ("FusedBatchNormGrad", "FusedBatchNormGradV2"):
        with pytest.raises(errors.InvalidArgumentError, match="data_format"):
            backward(name, data_format="NCDHW")


def test_statistics_of_bfloat16_have_no_kernel():
    half = V.astype(ml_dtypes.bfloat16)
    vectors = dict.fromkeys(("scale", "offset", "mean", "variance"), half)
    with pytest.raises(errors.NotFoundError):
        forward("FusedBatchNormV3", x=X.astype(ml_dtypes.bfloat16), **vectors)
    with pytest.raises(errors.InvalidArgumentError):
        forward("FusedBatchNormV2", x=X.astype(ml_dtypes.bfloat16), **vectors)
    with pytest.raises(errors.NotFoundError):
        forward("FusedBatchNormV3", scale=half)
    with pytest.raises(errors.InvalidArgumentError):
        forward("FusedBatchNormV3", offset=half, mean=half, variance=half)
    with pytest.raises(errors.InvalidArgumentError):
        backward("FusedBatchNormGradV3", scale=half, reserve_space_1=half, reserve_space_2=half)


@pytest.mark.parametrize(
    "changes",
    [{"epsilon": "1e-3"}, {"exponential_avg_factor": "a"}, {"is_training": 1}, {"is_training": "a"},
     {"is_training": np.bool_(True)}, {"data_format": 4}, {"unknown": 1}],
)  # fmt: skip
def test_attributes_of_the_wrong_kind(changes):
    with pytest.raises(TypeError):
        forward("FusedBatchNormV3", **changes)


def test_none_means_the_default_and_lists_are_converted():
    nothing = {"epsilon": None, "exponential_avg_factor": None, "data_format": None, "is_training": None}
    plain = forward("FusedBatchNormV3")
    for a, b in zip(plain, forward("FusedBatchNormV3", **nothing), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(plain, forward("FusedBatchNormV3", scale=[1.0, 1.0], x=X.tolist()), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError):
        raw_ops.FusedBatchNormV3(X)


def test_arrays_of_two_libraries():
    torch = pytest.importorskip("torch")
    with pytest.raises(errors.InvalidArgumentError, match="one library"):
        forward("FusedBatchNormV3", scale=torch.ones(2))


def test_cve_2021_29583():
    one = V[:1]
    with pytest.raises(errors.InvalidArgumentError):
        raw_ops.FusedBatchNorm(np.ones((10, 10, 10, 6), np.float32), one, one, one, one, is_training=False)
    with pytest.raises(errors.InvalidArgumentError):
        raw_ops.FusedBatchNorm(np.ones((10, 10, 10, 1), np.float32), NONE, NONE, NONE, NONE, is_training=False)


def test_cve_2021_29555():
    result = raw_ops.FusedBatchNorm(np.ones((1, 1, 1, 0), np.float32), NONE, NONE, NONE, NONE, is_training=False)
    assert result.y.shape == (1, 1, 1, 0)
    assert all(part.shape == (0,) for part in result[1:])


def test_cve_2021_41223():
    with pytest.raises(errors.InvalidArgumentError, match="same shape"):
        raw_ops.FusedBatchNormGrad(
            np.ones((1, 1, 3, 3), np.float32), np.ones((1, 1, 1, 2), np.float32), V, V, THREE, data_format="NCHW"
        )


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", ["FusedBatchNormGradV2", "FusedBatchNormGradV3"])
def test_empty_scale_in_gradients(name, data_format):
    more = {"reserve_space_3": X} if name.endswith("V3") else {}
    with pytest.raises(errors.InvalidArgumentError):
        backward(name, scale=NONE, data_format=data_format, **more)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_empty_scale_in_volumes(dtype):
    x = np.ones((1, 2, 2, 2, 2), dtype)
    with pytest.raises(errors.InvalidArgumentError):
        raw_ops.FusedBatchNormV3(x, NONE, V, V, V, data_format="NCDHW")


@pytest.mark.parametrize("epsilon", [-10.0, float("nan")])
def test_negative_epsilon_is_not_an_error(epsilon):
    result = backward("FusedBatchNormGradV3", epsilon=epsilon)
    assert np.isnan(result.x_backprop).all()
    assert np.isnan(result.scale_backprop).all()
    np.testing.assert_allclose(result.offset_backprop, X.reshape(-1, 2).sum(axis=0))


def test_sizes_whose_product_overflows():
    torch = pytest.importorskip("torch")
    x = torch.empty(0).as_strided((0, 1, 2**31, 2**32, 2), (0, 0, 0, 0, 0))
    v = torch.ones(2)
    with pytest.raises(errors.InvalidArgumentError, match="2\\^63"):
        raw_ops.FusedBatchNormV3(x, v, v, v, v, data_format="NDHWC")


def test_errors_name_the_op_and_what_it_was_given():
    with pytest.raises(errors.InvalidArgumentError) as caught:
        forward("FusedBatchNormV3", scale=THREE)
    assert "FusedBatchNormV3" in caught.value.__notes__[0]
    assert "float32[3]" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"axis": 4}, "x must have an axis"),
        ({"mask": 3}, "from 0 to 2"),
        ({"mask": -1}, "from 0 to 2"),
        ({"mask": [1, 0]}, "one boolean"),
        ({"mask": [True]}, "one boolean"),
        ({"mask": [True, True], "axis": 0}, "axis 0 holds the channels"),
        ({"scale": THREE}, "scale must have one element"),
        ({"running_mean": V[None], "running_variance": V}, "running_mean must have one element"),
        ({"training": False}, "must be given"),
        ({"running_mean": V}, "must be given together"),
        ({"running_variance": V}, "must be given together"),
        ({"convention": "caffe"}, "convention must be one of"),
        ({"epsilon": -1.0}, "epsilon must be 0 or more, got -1.0"),
        ({"epsilon": float("nan")}, "epsilon must be 0 or more, got nan"),
        ({"epsilon": float("inf")}, "epsilon must be 0 or more, got inf: a finite number"),
        ({"epsilon": np.array([1e-3])}, r"epsilon must be a number, got float64\[1\]"),
        ({"momentum": 1.5}, "momentum must be a share, from 0 to 1, got 1.5"),
        ({"momentum": float("nan")}, "momentum must be a share"),
        ({"convention": None}, "convention must be one of .* got None"),
        ({"epsilon": -1, "x": X.tolist()}, "epsilon must be 0 or more"),
        ({"x": X.astype(int)}, "x must be one of"),
        ({"x": X[:1, :1, :1], "convention": "torch"}, "more than 1 element"),
    ],
)
def test_batch_norm(arguments, says):
    arguments = {"x": X, "training": True} | arguments
    with pytest.raises(errors.InvalidArgumentError, match=says):
        weft.batch_norm(**arguments)
