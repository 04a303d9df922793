"""Tiny random llama-style GGUF files with a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, CONTEXT = 32, 48, 4, 2, 256
NORMAL = 1


def write_tiny_gguf(path: Path, *, last_token: str = "<last>", seed: int = 0) -> Path:
    """Write a one-layer model with float32 weights and return its path.

    Its tokens are the printable bytes, a merged pair of them, and `last_token`.
    """
    tokens = [*map(chr, range(33, 127)), "\u0120", "th", last_token]
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * len(tokens))
    writer.add_token_merges(["t h"])
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
