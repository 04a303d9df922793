"""Tiny random llama-style GGUF files with a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, CONTEXT = 32, 48, 4, 2, 256
NORMAL = 1


def begin(
    path: Path, arch: str = "llama", *, hidden: int, inner: int, heads: int, kv_heads: int, context: int = 64
) -> gguf.GGUFWriter:
    """Return the writer of a one-layer model with these sizes."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def matrices(vocab: int, hidden: int, inner: int, kv: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a one-layer model's matrices; `kv` is the width of K and of V."""
    return {
        **{"token_embd.weight": (vocab, hidden), "blk.0.attn_q.weight": (hidden, hidden)},
        **{"blk.0.attn_k.weight": (kv, hidden), "blk.0.attn_v.weight": (kv, hidden)},
        **{"blk.0.attn_output.weight": (hidden, hidden), "blk.0.ffn_gate.weight": (inner, hidden)},
        **{"blk.0.ffn_up.weight": (inner, hidden), "blk.0.ffn_down.weight": (hidden, inner)},
    }


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(path: Path, *, last_token: str = "<last>", seed: int = 0) -> Path:
    """Write a one-layer model with float32 weights and return its path.

    Its tokens are the printable bytes, a merged pair of them, and `last_token`.
    """
    tokens = [*map(chr, range(33, 127)), "\u0120", "th", last_token]
    random = np.random.default_rng(seed)
    writer = begin(path, hidden=HIDDEN, inner=INNER, heads=HEADS, kv_heads=KV_HEADS, context=CONTEXT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * len(tokens))
    writer.add_token_merges(["t h"])
    for name, shape in matrices(len(tokens), HIDDEN, INNER, HIDDEN // HEADS * KV_HEADS).items():
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
    finish(writer)
    return path
