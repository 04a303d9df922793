"""Runtime: batches, KV caches, forward passes and their costs."""
