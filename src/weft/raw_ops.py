"""The contract: TensorFlow's names, arguments, results and errors. One line per op."""

from .ops.batch import batch as Batch
from .ops.batch import unbatch as Unbatch
from .ops.batch import unbatch_grad as UnbatchGrad
from .ops.batch_function import batch_function as BatchFunction

__all__ = ["Batch", "BatchFunction", "Unbatch", "UnbatchGrad"]
