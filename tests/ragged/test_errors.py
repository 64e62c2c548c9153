"""The ragged ops on bad input, one argument at a time beside a good call; by position or name."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from weft import RaggedTensor, VariantArray, raw_ops
from weft.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError

SPLITS = np.array([0, 2, 2, 3])


def good(op):
    calls = {
        "RaggedTensorToVariant": {"rt_nested_splits": [SPLITS], "rt_dense_values": np.ones(3), "batched_input": True},
        "RaggedGather": {
            "params_nested_splits": [SPLITS],
            "params_dense_values": np.ones(3),
            "indices": np.array([0]),
            "OUTPUT_RAGGED_RANK": 1,
        },
        "RaggedRange": {"starts": np.int32(0), "limits": np.int32(3), "deltas": np.int32(1)},
        "RaggedTensorToTensor": {
            "shape": -1,
            "values": np.ones(3),
            "default_value": np.float64(0),
            "row_partition_tensors": [SPLITS],
            "row_partition_types": ["ROW_SPLITS"],
        },
        "RaggedTensorToSparse": {"rt_nested_splits": [SPLITS], "rt_dense_values": np.ones(3)},
        "RaggedFillEmptyRows": {
            "value_rowids": np.array([0, 2]),
            "values": np.ones(2),
            "nrows": np.array(3),
            "default_value": np.float64(0),
        },
        "RaggedFillEmptyRowsGrad": {"reverse_index_map": np.array([0]), "grad_values": np.ones(2)},
        "RaggedBincount": {
            "splits": SPLITS,
            "values": np.array([0, 1, 1]),
            "size": np.array(2),
            "weights": np.zeros(0, np.float32),
        },
        "RaggedCountSparseOutput": {
            "splits": SPLITS,
            "values": np.array([0, 1, 1]),
            "weights": np.zeros(0, np.float32),
            "binary_output": False,
        },
        "RaggedCross": {
            "ragged_values": [np.array(["a", "b", "c"], object)],
            "ragged_row_splits": [SPLITS],
            "sparse_indices": [],
            "sparse_values": [],
            "sparse_shape": [],
            "dense_inputs": [],
            "input_order": "R",
            "hashed_output": False,
            "num_buckets": 0,
            "hash_key": 1,
            "out_values_type": "string",
            "out_row_splits_type": "int64",
        },
        "RaggedTensorFromVariant": {
            "encoded_ragged": VariantArray([np.ones(2), np.ones(1)]),
            "input_ragged_rank": 0,
            "output_ragged_rank": 1,
            "Tvalues": "float64",
        },
        "RaggedTensorToVariantGradient": {
            "encoded_ragged_grad": VariantArray([np.ones(2), np.ones(1)]),
            "row_splits": np.array([0, 2, 3]),
            "dense_values_shape": np.array([3], np.int32),
            "Tvalues": "float64",
        },
    }
    return calls[op]


BAD = [
    ("RaggedTensorToVariant", {"rt_nested_splits": 3}, TypeError),
    ("RaggedTensorToVariant", {"rt_nested_splits": "ab"}, TypeError),
    ("RaggedTensorToVariant", {"rt_nested_splits": [[0, [1]]]}, InvalidArgumentError),
    ("RaggedTensorToVariant", {"rt_nested_splits": [["a"]]}, InvalidArgumentError),
    ("RaggedTensorToVariant", {"rt_dense_values": np.zeros(3, "datetime64[s]")}, NotFoundError),
    ("RaggedTensorToVariant", {"rt_dense_values": [[1], [1, 2]]}, InvalidArgumentError),
    ("RaggedTensorToVariant", {"batched_input": 1}, TypeError),
    ("RaggedTensorToVariant", {"batched_input": None}, TypeError),
    ("RaggedTensorFromVariant", {"input_ragged_rank": -2}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"output_ragged_rank": -1}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"output_ragged_rank": 1.0}, TypeError),
    ("RaggedTensorFromVariant", {"output_ragged_rank": 0, "input_ragged_rank": -1}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"Tsplits": "float32"}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"Tvalues": "nonsense"}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"encoded_ragged": np.ones(2)}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"encoded_ragged": VariantArray([np.ones(2), np.ones(1, "f4")])}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"encoded_ragged": VariantArray([np.ones(2), np.asarray(1.0)])}, InvalidArgumentError),
    ("RaggedTensorFromVariant", {"encoded_ragged": VariantArray([np.ones((2, 1)), np.ones(1)])}, InvalidArgumentError),
    (
        "RaggedTensorFromVariant",
        {"encoded_ragged": VariantArray([([[0, 5]], np.ones(1))]), "input_ragged_rank": 1, "output_ragged_rank": 2},
        InvalidArgumentError,
    ),
    (
        "RaggedTensorFromVariant",
        {"encoded_ragged": VariantArray([([np.array([0, 1])], np.ones(1))]), "input_ragged_rank": 1, "Tsplits": "int32"}
        | {"output_ragged_rank": 2},
        InvalidArgumentError,
    ),
    ("RaggedTensorToVariantGradient", {"dense_values_shape": np.array([3])}, InvalidArgumentError),
    ("RaggedTensorToVariantGradient", {"dense_values_shape": [2**40]}, InvalidArgumentError),
    ("RaggedTensorToVariantGradient", {"encoded_ragged_grad": [1]}, InvalidArgumentError),
    ("RaggedTensorToVariantGradient", {"row_splits": np.array([0.0, 3.0])}, InvalidArgumentError),
    ("RaggedGather", {"params_nested_splits": []}, InvalidArgumentError),
    ("RaggedGather", {"indices": np.array([0.5])}, InvalidArgumentError),
    ("RaggedGather", {"params_nested_splits": [np.array([0, 2, 1, 3])]}, InvalidArgumentError),
    ("RaggedGather", {"params_nested_splits": [np.array([-1, 2, 3])]}, InvalidArgumentError),
    ("RaggedGather", {"OUTPUT_RAGGED_RANK": 2}, InvalidArgumentError),
    ("RaggedGather", {"params_nested_splits": [np.array([[0, 2, 2, 3]])]}, InvalidArgumentError),
    (
        "RaggedGather",
        {"params_nested_splits": [np.array([0, 9])], "indices": np.zeros(0, np.int64)},
        InvalidArgumentError,
    ),
    ("RaggedRange", {"starts": np.int64(0)}, InvalidArgumentError),
    ("RaggedRange", {k: np.ones(1, np.int8) for k in ("starts", "limits", "deltas")}, InvalidArgumentError),
    (
        "RaggedRange",
        {"starts": np.float32(0), "limits": np.float32("nan"), "deltas": np.float32(1)},
        InvalidArgumentError,
    ),
    ("RaggedRange", {"starts": np.int64(0), "limits": np.int64(2**62), "deltas": np.int64(1)}, ResourceExhaustedError),
    ("RaggedRange", {"Tsplits": "int16"}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"row_partition_types": ["ROW_LENGTHS"]}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"row_partition_types": ["NONSENSE"]}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"row_partition_types": ["FIRST_DIM_SIZE"]}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"row_partition_types": ["ROW_SPLITS"] * 2}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"default_value": np.float32(0)}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"shape": [-2, -1]}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"shape": np.array([2**40, 2**40])}, ResourceExhaustedError),
    (
        "RaggedTensorToTensor",
        {
            "row_partition_types": ["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
            "row_partition_tensors": [np.array(3), np.array([1, 0, 1])],
        },
        InvalidArgumentError,
    ),
    (
        "RaggedTensorToTensor",
        {
            "row_partition_types": ["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
            "row_partition_tensors": [np.array(-3), np.array([0])],
        },
        InvalidArgumentError,
    ),
    (
        "RaggedTensorToTensor",
        {
            "row_partition_types": ["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
            "row_partition_tensors": [np.array(2**62), np.array([0])],
        },
        ResourceExhaustedError,
    ),
    ("RaggedTensorToSparse", {"rt_nested_splits": []}, InvalidArgumentError),
    ("RaggedTensorToSparse", {"rt_nested_splits": [np.array([[0, 2, 2, 3]])]}, InvalidArgumentError),
    ("RaggedFillEmptyRows", {"nrows": np.array([3])}, InvalidArgumentError),
    ("RaggedFillEmptyRows", {"nrows": np.array(-1)}, InvalidArgumentError),
    ("RaggedFillEmptyRows", {"value_rowids": np.array([0, 2], np.int32)}, InvalidArgumentError),
    ("RaggedFillEmptyRows", {"nrows": np.array(2**62)}, ResourceExhaustedError),
    ("RaggedFillEmptyRowsGrad", {"reverse_index_map": np.array([[0]])}, InvalidArgumentError),
    ("RaggedFillEmptyRowsGrad", {"grad_values": np.array(["a"], object)}, NotFoundError),
    ("RaggedFillEmptyRowsGrad", {"grad_values": np.array([True]), "reverse_index_map": np.array([[9]])}, NotFoundError),
    ("RaggedBincount", {"weights": np.ones(3, np.float16)}, InvalidArgumentError),
    ("RaggedBincount", {"weights": np.ones(2, np.float32), "binary_output": True}, InvalidArgumentError),
    ("RaggedBincount", {"values": np.ones(3)}, InvalidArgumentError),
    ("RaggedBincount", {"splits": SPLITS.astype(np.int32)}, InvalidArgumentError),
    ("RaggedBincount", {"size": np.array(2**60)}, ResourceExhaustedError),
    ("RaggedBincount", {"weights": [[1], [2, 3]]}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"weights": np.ones(3, np.float16)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"weights": np.ones(3, np.uint32)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"weights": ["a", "b", "c"]}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"weights": np.ones((3, 1), np.float32)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"weights": np.ones(2, np.float32)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"values": np.ones(3)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"values": [[0], [1, 1]]}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"values": np.array([0, 1, -1])}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"values": np.array([0, 1, 2**63 - 1])}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"values": np.array([0, 1])}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"splits": np.array(0)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"splits": SPLITS.astype(np.int32)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"splits": SPLITS[::-1]}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"splits": SPLITS.astype(float)}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"minlength": -2}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"maxlength": -2}, InvalidArgumentError),
    ("RaggedCountSparseOutput", {"maxlength": "3"}, TypeError),
    (
        "RaggedCountSparseOutput",
        {"splits": np.array([0, 2**50]), "values": np.broadcast_to(np.int64(1), (2**50,))},
        ResourceExhaustedError,
    ),
    ("RaggedCross", {"num_buckets": -1}, InvalidArgumentError),
    ("RaggedCross", {"out_values_type": "float32"}, InvalidArgumentError),
    ("RaggedCross", {"ragged_values": [np.ones(3)]}, InvalidArgumentError),
    ("RaggedCross", {"ragged_values": [np.array([["a"]], object)]}, InvalidArgumentError),
    ("RaggedCross", {"ragged_row_splits": []}, InvalidArgumentError),
    ("RaggedCross", {"input_order": "S"}, InvalidArgumentError),
    ("RaggedCross", {"input_order": 3}, TypeError),
    ("RaggedTensorToTensor", {"default_value": None}, InvalidArgumentError),
    ("RaggedTensorToTensor", {"default_value": "x"}, InvalidArgumentError),
    ("RaggedTensorToVariant", {"rt_dense_values": np.array([1, None, 2], object)}, InvalidArgumentError),
    ("RaggedCross", {"input_order": "RD", "dense_inputs": [np.array([1, 2, 3])]}, InvalidArgumentError),
    (
        "RaggedCross",
        {
            "input_order": "RS",
            "sparse_indices": [np.array([[0, 0]])],
            "sparse_values": [np.array([1, 2])],
            "sparse_shape": [np.array([3, 1])],
        },
        InvalidArgumentError,
    ),
]


@pytest.mark.parametrize(("name", "change", "error"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input(name, change, error):
    getattr(raw_ops, name)(**good(name))  # what is changed is all that is wrong
    with pytest.raises(error):
        getattr(raw_ops, name)(**(good(name) | change))


def test_errors_name_the_op_and_what_came():
    with pytest.raises(
        InvalidArgumentError, match="must end with 3, the number of rows it partitions, got 2"
    ) as raised:
        raw_ops.RaggedTensorToVariant([np.array([0, 2])], np.ones(3), True)
    assert raised.value.__notes__ == [
        "in weft.raw_ops.RaggedTensorToVariant(rt_nested_splits: [int64[2]], rt_dense_values: float64[3])"
    ]


def test_absurd_ragged_rank_is_refused_at_once():
    with pytest.raises(ValueError, match="ragged_rank"):
        RaggedTensor.from_rows([], ragged_rank=8968073515812833920)


@pytest.mark.parametrize("name", [n for n in raw_ops.__all__ if n.startswith("Ragged")])
def test_arguments_by_position_or_name(name):
    op = getattr(raw_ops, name)
    named = good(name)
    parameters = list(inspect.signature(op).parameters)
    assert parameters[-1] == "name"
    positional = [named[p] for p in parameters if p in named]
    first, second = op(**named, name="x"), op(*positional)
    assert repr(first) == repr(second)
