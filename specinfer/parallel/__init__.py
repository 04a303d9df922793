"""Tensor and pipeline parallelism: ranks, their shards of a model, and the exchanges between them."""
