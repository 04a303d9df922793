"""Hybrids of published shapes with random weights, as GGUF files that llama.cpp reads, too.

All matrices have Q4_0 blocks. A shape that attends in every layer is a plain model with the same sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

CONTEXT: Final = 4096
_BLOCK: Final = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0]  # elements, bytes
_SPREAD: Final = 4.6  # standard deviation of the levels of random blocks
_DELTA_HEADS: Final = 16  # as many of keys as of values
_DELTA_SIZE: Final = 128  # of keys and of values
_MAMBA_STATE: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a hybrid, as in its config.json."""

    architecture: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    attends: Collection[int]  # layers with attention
    heads: int
    kv_heads: int
    head_dim: int = 64
    mamba_heads: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict)  # further metadata


_LFM2: Final = Shape(
    architecture="lfm2",
    vocab=65536,
    hidden=2048,
    inner=8192,
    layers=16,
    attends=(2, 5, 8, 10, 12, 14),
    heads=32,
    kv_heads=8,
)
_QWEN: Final = Shape(
    architecture="qwen35",
    vocab=248320,
    hidden=2048,
    inner=6144,
    layers=24,
    attends=range(3, 24, 4),
    heads=8,
    kv_heads=2,
    head_dim=256,
)
_GRANITE: Final = Shape(
    architecture="granitehybrid",
    vocab=100352,
    hidden=1536,
    inner=4096,
    layers=40,
    attends=range(5, 40, 10),
    heads=12,
    kv_heads=4,
    head_dim=128,
    mamba_heads=48,
    numbers={"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0, "attention.scale": 1 / 128},
)
_GRANITE_350M: Final[dict[str, Any]] = {"layers": 32, "attends": (10, 13, 17, 27)}
# Each with a smaller one as its draft: the next smaller one published, or four layers of its own kind.
SHAPES: Final = {
    "LFM2-1.2B": (_LFM2, replace(_LFM2, hidden=1024, inner=4608, heads=16)),
    "Qwen3.5-0.8B": (
        replace(_QWEN, hidden=1024, inner=3584),
        replace(_QWEN, hidden=512, inner=1536, layers=4, attends=(3,)),
    ),
    "Qwen3.5-2B": (_QWEN, replace(_QWEN, hidden=1024, inner=3584)),
    "Granite-4-h-1B": (
        _GRANITE,
        replace(_GRANITE, hidden=768, inner=2048, head_dim=64, mamba_heads=24, **_GRANITE_350M),
    ),
}
_SMALL: Final = replace(_LFM2, vocab=2048, hidden=128, inner=256, layers=4, attends=(2,), heads=2, kv_heads=1)
TOY: Final = (_SMALL, replace(_SMALL, hidden=64, heads=1))


def write_random(shape: Shape, path: Path) -> None:
    """Write a model of this shape; it has no tokenizer."""
    writer, random = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(1)
    writer.add_tokenizer_model("no_vocab")
    for key, value in _numbers(shape).items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"{shape.architecture}.{key}", value)
    for name, size in _tensors(shape):
        if name.endswith(("conv1d.weight", "conv.weight")) or "ssm_a" in name:
            floats = -random.random(size) if "ssm_a" in name else random.normal(0, 0.3, size)
            writer.add_tensor(name, floats.astype(np.float32))
        elif len(size) == 1 or "norm" in name or "ssm_d" in name:
            fill = 0 if name.endswith(".bias") else 1
            writer.add_tensor(name, np.full(size, fill, dtype=np.float32))
        else:
            writer.add_tensor(
                name, _blocks(size, random, "embd" in name), raw_dtype=gguf.GGMLQuantizationType.Q4_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(size: tuple[int, ...], random: np.random.Generator, embeds: bool) -> NDArray[np.uint8]:
    """Return a matrix in Q4_0 blocks: a scale in half precision, and 32 levels."""
    rows, columns = size
    blocks = random.integers(0, 256, (rows, columns // _BLOCK[0], _BLOCK[1]), dtype=np.uint8)
    scale = np.float16((0.02 if embeds else columns**-0.5) / _SPREAD)
    blocks[..., :2] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def _numbers(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    found: dict[str, Any] = {
        **{"block_count": shape.layers, "context_length": CONTEXT, "vocab_size": shape.vocab},
        **{"embedding_length": shape.hidden, "feed_forward_length": shape.inner},
        **{"attention.head_count": shape.heads, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim},
        "attention.head_count_kv": [
            shape.kv_heads if layer in shape.attends else 0 for layer in range(shape.layers)
        ],
        **shape.numbers,
    }
    if shape.architecture == "lfm2":
        return found | {"shortconv.l_cache": 3}
    found["ssm.conv_kernel"] = 4
    if shape.architecture == "granitehybrid":
        return found | {
            **{"ssm.state_size": _MAMBA_STATE, "ssm.group_count": 1, "ssm.time_step_rank": shape.mamba_heads},
            **{"ssm.inner_size": 2 * shape.hidden, "rope.dimension_count": shape.head_dim},
        }
    return found | {
        **{"ssm.state_size": _DELTA_SIZE, "ssm.inner_size": _DELTA_HEADS * _DELTA_SIZE},
        **dict.fromkeys(("ssm.group_count", "ssm.time_step_rank"), _DELTA_HEADS),
        "attention.head_count_kv": shape.kv_heads,
        "full_attention_interval": 1 if len(shape.attends) == shape.layers else 4,
        "rope.dimension_count": shape.head_dim // 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and sizes, rows first."""
    lfm2, qwen = (shape.architecture == name for name in ("lfm2", "qwen35"))
    d, inner, q, kv = shape.hidden, shape.inner, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention: dict[str, tuple[int, ...]]
    attention = {"attn_q": ((1 + qwen) * q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q)}
    if shape.architecture != "granitehybrid":
        attention |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
    yield "token_embd.weight", (shape.vocab, d)
    yield "token_embd_norm.weight" if lfm2 else "output_norm.weight", (d,)
    for layer in range(shape.layers):
        matrices = attention if layer in shape.attends else _recurrent(shape)
        second = {"post_attention_norm" if qwen else "ffn_norm": (d,)}
        mlp = {"ffn_gate": (inner, d), "ffn_up": (inner, d), "ffn_down": (d, inner)}
        for name, size in ({"attn_norm": (d,)} | matrices | second | mlp).items():
            plain = name if name.endswith((".bias", "ssm_a", "ssm_d")) else f"{name}.weight"
            yield f"blk.{layer}.{plain}", size


def _recurrent(shape: Shape) -> dict[str, tuple[int, ...]]:
    d, heads = shape.hidden, shape.mamba_heads
    if shape.architecture == "lfm2":
        return {"shortconv.in_proj": (3 * d, d), "shortconv.conv": (d, 3), "shortconv.out_proj": (d, d)}
    own: dict[str, tuple[int, ...]]
    if shape.architecture == "granitehybrid":
        channels = 2 * d + 2 * _MAMBA_STATE
        own = {"ssm_in": (2 * d + channels + heads, d), "ssm_norm": (1, 2 * d), "ssm_out": (d, 2 * d)}
        own |= {"ssm_conv1d.bias": (channels,), "ssm_a": (heads, 1), "ssm_d": (heads, 1)}
    else:
        heads, values = _DELTA_HEADS, _DELTA_HEADS * _DELTA_SIZE
        channels = 3 * values
        own = {"attn_qkv": (channels, d), "attn_gate": (values, d), "ssm_out": (d, values)}
        own |= {**dict.fromkeys(("ssm_beta", "ssm_alpha"), (heads, d)), "ssm_a": (heads,)}
        own["ssm_norm"] = (_DELTA_SIZE,)
    return own | {"ssm_conv1d": (channels, 4), "ssm_dt.bias": (heads,)}
