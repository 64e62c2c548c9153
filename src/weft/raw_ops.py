"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""

from .ops.batch_norm import fused_batch_norm as FusedBatchNorm
from .ops.batch_norm import fused_batch_norm_grad as FusedBatchNormGrad
from .ops.batch_norm import fused_batch_norm_grad_v2 as FusedBatchNormGradV2
from .ops.batch_norm import fused_batch_norm_grad_v3 as FusedBatchNormGradV3
from .ops.batch_norm import fused_batch_norm_v2 as FusedBatchNormV2
from .ops.batch_norm import fused_batch_norm_v3 as FusedBatchNormV3
from .ops.batch_norm_global import batch_norm_with_global_normalization as BatchNormWithGlobalNormalization
from .ops.batch_norm_global import batch_norm_with_global_normalization_grad as BatchNormWithGlobalNormalizationGrad

__all__ = [
    "BatchNormWithGlobalNormalization",
    "BatchNormWithGlobalNormalizationGrad",
    "FusedBatchNorm",
    "FusedBatchNormGrad",
    "FusedBatchNormGradV2",
    "FusedBatchNormGradV3",
    "FusedBatchNormV2",
    "FusedBatchNormV3",
]
