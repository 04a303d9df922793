"""Tensor and pipeline parallelism: ranks, their shares of a model, and the exchanges between them."""
