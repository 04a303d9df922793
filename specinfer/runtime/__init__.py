"""Models at work: batches, KV caches, forward passes, sampling laws."""
