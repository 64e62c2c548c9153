"""FusedBatchNorm and its relatives, their gradients, `weft.batch_norm` and the PyTorch module."""
