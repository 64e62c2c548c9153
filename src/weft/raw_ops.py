"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""

from .ops.batch import batch as Batch
from .ops.batch import unbatch as Unbatch
from .ops.batch import unbatch_grad as UnbatchGrad
from .ops.batch_function import batch_function as BatchFunction
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
