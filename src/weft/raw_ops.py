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
from .ops.ragged_count import ragged_count_sparse_output as RaggedCountSparseOutput
from .ops.ragged_count import ragged_cross as RaggedCross
from .ops.ragged_dense import ragged_fill_empty_rows as RaggedFillEmptyRows
from .ops.ragged_dense import ragged_fill_empty_rows_grad as RaggedFillEmptyRowsGrad
from .ops.ragged_dense import ragged_tensor_to_sparse as RaggedTensorToSparse
from .ops.ragged_dense import ragged_tensor_to_tensor as RaggedTensorToTensor
from .ops.ragged_gather import ragged_gather as RaggedGather
from .ops.ragged_gather import ragged_range as RaggedRange
from .ops.tensor_array import tensor_array_close_v3 as TensorArrayCloseV3
from .ops.tensor_array import tensor_array_concat_v3 as TensorArrayConcatV3
from .ops.tensor_array import tensor_array_gather_v3 as TensorArrayGatherV3
from .ops.tensor_array import tensor_array_read_v3 as TensorArrayReadV3
from .ops.tensor_array import tensor_array_scatter_v3 as TensorArrayScatterV3
from .ops.tensor_array import tensor_array_size_v3 as TensorArraySizeV3
from .ops.tensor_array import tensor_array_split_v3 as TensorArraySplitV3
from .ops.tensor_array import tensor_array_v3 as TensorArrayV3
from .ops.tensor_array import tensor_array_write_v3 as TensorArrayWriteV3
from .ops.tensor_array_grad import tensor_array_grad_v3 as TensorArrayGradV3
from .ops.tensor_array_grad import tensor_array_grad_with_shape as TensorArrayGradWithShape

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
    "RaggedCountSparseOutput",
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
    "TensorArrayCloseV3",
    "TensorArrayConcatV3",
    "TensorArrayGatherV3",
    "TensorArrayGradV3",
    "TensorArrayGradWithShape",
    "TensorArrayReadV3",
    "TensorArrayScatterV3",
    "TensorArraySizeV3",
    "TensorArraySplitV3",
    "TensorArrayV3",
    "TensorArrayWriteV3",
    "Unbatch",
    "UnbatchGrad",
]
