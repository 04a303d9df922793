"""Whose drafts these are: a model, whatever format it is in."""

from __future__ import annotations

import hashlib

import torch

from specinfer.models.config import Family
from specinfer.models.weights import OpenModel

_NORM = "model.norm.weight"


def fingerprint(model: OpenModel) -> str:
    """A SHA-256 of a model's sizes and of its last norm, which no quantization of a file rounds.

    So the same model has it as a GGUF file and as a folder. One that was trained further has another, unless
    its norms were frozen or have not moved by a bit, as with adapters on products alone: then it passes for
    the one it was made of. What was tuned for that guesses less well, and the text is right all the same.
    """
    config = model.config
    sizes = (config.vocab_size, config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads)
    # A GGUF file says llama of a Mistral, too.
    family = Family.LLAMA if config.family is Family.MISTRAL else config.family
    digest = hashlib.sha256(repr((str(family), *sizes)).encode())
    if _NORM in model.shapes:
        norm_D = model.read_rows(_NORM, 0, model.shapes[_NORM][0]).to(torch.float32)
        # What a GGUF file adds to norms that are written without it.
        digest.update((norm_D + config.norm_weight_offset).contiguous().numpy().tobytes())
    return digest.hexdigest()
