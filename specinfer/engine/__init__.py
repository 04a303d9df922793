"""The engine: continuous batching of token trees, one step at a time."""
