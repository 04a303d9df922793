"""Attention over the block-managed KV cache, with tree masks."""
