"""Random GGUF blocks that models can compute with."""

from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from tests.tiny_gguf import begin, finish, matrices

# Offsets of a block's float16 numbers.
HALVES = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_S": (0,), "MXFP4": ()},
}
# The scale that gives weights of about 0.1.
SIZES = {
    **{"Q8_0": 0.0015, "Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.01, "Q5_1": 0.01},
    **{"Q4_K": 0.0005, "Q5_K": 0.0003, "Q6_K": 0.0001, "Q2_K": 0.005, "Q3_K": 0.001},
    **{"IQ4_NL": 0.001, "IQ4_XS": 0.00005, "IQ3_S": 0.0005},
}
VOCAB, HIDDEN, INNER, HEAD = 40, 256, 512, 32
MATRICES = {
    **{"token_embd.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)},
    **matrices(VOCAB, HIDDEN, INNER, HIDDEN // 2),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return bytes of rows of blocks with random levels, and scales and mins of both signs."""
    random = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[Kind[kind]]
    octets = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = SIZES[kind] * random.standard_normal((rows, columns // block, 1))
        octets[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        octets[..., 0] = random.integers(120, 126, octets.shape[:-1])  # exponents of scales
    if kind == "Q8_0":
        octets[octets == 128] = 127  # -128, which is never written
        octets[..., :2] = (
            (SIZES[kind] * random.random((rows, columns // block, 1))).astype(np.float16).view(np.uint8)
        )
    return octets.reshape(rows, -1)


def write_blocks(path: Path, kinds: dict[str, str], usual: str, experts: int = 0) -> Path:
    """Write a one-layer llama with the given kinds by matrix name, and the `usual` kind elsewhere.

    With `experts` it is a Mixtral, two of whose experts serve a token.
    """
    heads = HIDDEN // HEAD
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = begin(path, hidden=HIDDEN, inner=INNER, heads=heads, kv_heads=heads // 2)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        gates = np.random.default_rng(9).standard_normal((experts, HIDDEN)).astype(np.float32)
        writer.add_tensor("blk.0.ffn_gate_inp.weight", gates)
    for number, (name, (rows, columns)) in enumerate(MATRICES.items()):
        kind = kinds.get(name, usual)
        if experts and ".ffn_" in name:
            stack = random_blocks(kind, experts * rows, columns, number).reshape(experts, rows, -1)
            writer.add_tensor(name.replace(".weight", "_exps.weight"), stack, raw_dtype=Kind[kind])
        elif kind == "F32":
            values = np.random.default_rng(number).standard_normal((rows, columns)).astype(np.float32)
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, random_blocks(kind, rows, columns, number), raw_dtype=Kind[kind])
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
    finish(writer)
    return path
