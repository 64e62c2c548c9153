"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""

from .ops.batch import batch as Batch
from .ops.batch import unbatch as Unbatch
from .ops.batch import unbatch_grad as UnbatchGrad
from .ops.batch_function import batch_function as BatchFunction
from .ops.ragged import ragged_tensor_from_variant as RaggedTensorFromVariant
from .ops.ragged import ragged_tensor_to_variant as RaggedTensorToVariant
from .ops.ragged import ragged_tensor_to_variant_gradient as RaggedTensorToVariantGradient
from .ops.ragged_count import ragged_bincount as RaggedBincount
from .ops.ragged_count import ragged_cross as RaggedCross
from .ops.ragged_dense import ragged_fill_empty_rows as RaggedFillEmptyRows
from .ops.ragged_dense import ragged_fill_empty_rows_grad as RaggedFillEmptyRowsGrad
from .ops.ragged_dense import ragged_tensor_to_sparse as RaggedTensorToSparse
from .ops.ragged_dense import ragged_tensor_to_tensor as RaggedTensorToTensor
from .ops.ragged_gather import ragged_gather as RaggedGather
from .ops.ragged_gather import ragged_range as RaggedRange

__all__ = [
    "Batch",
    "BatchFunction",
    "RaggedBincount",
    "RaggedCross",
    "RaggedFillEmptyRows",
    "RaggedFillEmptyRowsGrad",
    "RaggedGather",
    "RaggedRange",
    "RaggedTensorFromVariant",
    "RaggedTensorToSparse",
    "RaggedTensorToTensor",
    "RaggedTensorToVariant",
    "RaggedTensorToVariantGradient",
    "Unbatch",
    "UnbatchGrad",
]
