"""Batch, Unbatch, UnbatchGrad and BatchFunction, and `weft.batched`: concurrent callers share one batch and one backward."""
