"""Fingerprints of models, which identify a draft's target in any file format."""

from __future__ import annotations

import hashlib
from typing import Final

import torch

from specinfer.models.config import Family
from specinfer.models.experts import EXPERTS
from specinfer.models.open_model import OpenModel

_LAST_NORM: Final = "model.norm.weight"
_DIGITS: Final = 32  # hex digits of each part; 128 bits
_STRIDE: Final = 97  # rows between the samples of consecutive matrices


def fingerprint(model: OpenModel) -> str:
    """A text that identifies a model's weights: `2:VECTORS` or `2:VECTORS:DTYPE:ROWS`.

    VECTORS is a hash of the sizes and of all norms and biases, which no quantization of a file rounds: it is
    the same for a GGUF file and a folder of one model. ROWS is a hash of one row of each matrix of each
    layer, if the file has all of them in one DTYPE. It distinguishes a fine-tune from its base even if norms
    and biases are equal, unless one of the two is quantized. In each layer only the first expert is read.
    Takes about 10 ms.
    """
    shapes = sorted(
        (name, shape) for name, shape in model.shapes.items() if EXPERTS not in name or f"{EXPERTS}0." in name
    )
    vectors = _sizes(model)
    for name, shape in shapes:
        if len(shape) == 1:
            vectors.update(name.encode())
            vectors.update(_vector(model, name))
    found = f"2:{vectors.hexdigest()[:_DIGITS]}"
    matrices = {name: shape[0] for name, shape in shapes if len(shape) == 2 and ".layers." in name}
    dtypes = {model.dtype(name) for name in matrices}
    if len(dtypes) != 1 or None in dtypes:
        return found
    rows = hashlib.sha256()
    for number, (name, count) in enumerate(matrices.items()):
        row = number * _STRIDE % count
        rows.update(model.read_rows(name, row, row + 1).contiguous().view(torch.uint8).numpy().tobytes())
    [dtype] = dtypes
    return f"{found}:{str(dtype).removeprefix('torch.')}:{rows.hexdigest()[:_DIGITS]}"


def is_of(kept: str, model: OpenModel) -> bool:
    """True if a stored fingerprint matches this model, as far as it can be compared.

    Rows are compared if both have the same dtype. Fingerprints of the first version are 64 digits, a hash of
    the sizes and the last norm alone.
    """
    if ":" not in kept:
        return kept == _first_version(model)
    theirs, own = kept.split(":"), fingerprint(model).split(":")
    if theirs[:2] != own[:2]:
        return False
    return len(theirs) == 2 or len(own) == 2 or theirs[2] != own[2] or theirs[3] == own[3]


def _first_version(model: OpenModel) -> str:
    digest = _sizes(model)
    if _LAST_NORM in model.shapes:
        digest.update(_vector(model, _LAST_NORM))
    return digest.hexdigest()


def _sizes(model: OpenModel) -> hashlib._Hash:
    config = model.config
    sizes = (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads)
    # A GGUF file has the architecture llama for a Mistral, too.
    family = Family.LLAMA if config.family is Family.MISTRAL else config.family
    return hashlib.sha256(repr((str(family), *sizes)).encode())


def _vector(model: OpenModel, name: str) -> bytes:
    values = model.read_rows(name, 0, model.shapes[name][0]).to(torch.float32)
    if "norm" in name and ".mixer." not in name:
        values = values + model.config.norm_weight_offset  # as in a GGUF file
    return values.contiguous().numpy().tobytes()
