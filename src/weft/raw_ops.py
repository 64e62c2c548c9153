"""All ops under TensorFlow's names, with its arguments, results and errors: one line per op."""

from .batching.function_op import batch_function as BatchFunction
from .batching.ops import batch as Batch
from .batching.ops import unbatch as Unbatch
from .batching.ops import unbatch_grad as UnbatchGrad
from .norm.global_norm import batch_norm_with_global_normalization as BatchNormWithGlobalNormalization
from .norm.global_norm import batch_norm_with_global_normalization_grad as BatchNormWithGlobalNormalizationGrad
from .norm.ops import fused_batch_norm as FusedBatchNorm
from .norm.ops import fused_batch_norm_grad as FusedBatchNormGrad
from .norm.ops import fused_batch_norm_grad_v2 as FusedBatchNormGradV2
from .norm.ops import fused_batch_norm_grad_v3 as FusedBatchNormGradV3
from .norm.ops import fused_batch_norm_v2 as FusedBatchNormV2
from .norm.ops import fused_batch_norm_v3 as FusedBatchNormV3
from .ragged.count_ops import ragged_bincount as RaggedBincount
from .ragged.count_ops import ragged_count_sparse_output as RaggedCountSparseOutput
from .ragged.count_ops import ragged_cross as RaggedCross
from .ragged.dense_ops import ragged_fill_empty_rows as RaggedFillEmptyRows
from .ragged.dense_ops import ragged_fill_empty_rows_grad as RaggedFillEmptyRowsGrad
from .ragged.dense_ops import ragged_tensor_to_sparse as RaggedTensorToSparse
from .ragged.dense_ops import ragged_tensor_to_tensor as RaggedTensorToTensor
from .ragged.gather_ops import ragged_gather as RaggedGather
from .ragged.gather_ops import ragged_range as RaggedRange
from .ragged.variant_ops import ragged_tensor_from_variant as RaggedTensorFromVariant
from .ragged.variant_ops import ragged_tensor_to_variant as RaggedTensorToVariant
from .ragged.variant_ops import ragged_tensor_to_variant_gradient as RaggedTensorToVariantGradient
from .tensor_array.grad_ops import tensor_array_grad_v3 as TensorArrayGradV3
from .tensor_array.grad_ops import tensor_array_grad_with_shape as TensorArrayGradWithShape
from .tensor_array.ops import tensor_array_close_v3 as TensorArrayCloseV3
from .tensor_array.ops import tensor_array_concat_v3 as TensorArrayConcatV3
from .tensor_array.ops import tensor_array_gather_v3 as TensorArrayGatherV3
from .tensor_array.ops import tensor_array_read_v3 as TensorArrayReadV3
from .tensor_array.ops import tensor_array_scatter_v3 as TensorArrayScatterV3
from .tensor_array.ops import tensor_array_size_v3 as TensorArraySizeV3
from .tensor_array.ops import tensor_array_split_v3 as TensorArraySplitV3
from .tensor_array.ops import tensor_array_v3 as TensorArrayV3
from .tensor_array.ops import tensor_array_write_v3 as TensorArrayWriteV3

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
