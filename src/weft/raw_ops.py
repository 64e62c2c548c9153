"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""

from .ops.batch import batch as Batch
from .ops.batch import unbatch as Unbatch
from .ops.batch import unbatch_grad as UnbatchGrad
from .ops.batch_function import batch_function as BatchFunction
from .ops.batch_norm import fused_batch_norm as FusedBatchNorm
from .ops.batch_norm import fused_batch_norm_grad as FusedBatchNormGrad
from .ops.batch_norm import fused_batch_norm_grad_v2 as FusedBatchNormGradV2
from .ops.batch_norm import fused_batch_norm_grad_v3 as FusedBatchNormGradV3
from .ops.batch_norm import fused_batch_norm_v2 as FusedBatchNormV2
from .ops.batch_norm import fused_batch_norm_v3 as FusedBatchNormV3
from .ops.batch_norm_global import batch_norm_with_global_normalization as BatchNormWithGlobalNormalization
from .ops.batch_norm_global import batch_norm_with_global_normalization_grad as BatchNormWithGlobalNormalizationGrad
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
    "BatchNormWithGlobalNormalization",
    "BatchNormWithGlobalNormalizationGrad",
    "FusedBatchNorm",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
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
