"""A head as a folder that the `speculators` library, vLLM and specinfer read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.files import NewFile
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import FINGERPRINT, SCALE
from specinfer.heads.eagle import EagleHead
from specinfer.heads.shapes import head_shapes
from specinfer.heads.speculators_config import config_to_speculators
from specinfer.models.safetensors_writer import write_safetensors


def write_head(
    head: EagleHead | BlockHead,
    folder: Path,
    *,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype = torch.float32,
    fingerprint: str | None = None,
) -> None:
    """Write config.json and model.safetensors of a head whose target is `verifier`, each whole or not at all.

    Matrices of dtype int8 have a factor for each row, and all else is float32; nobody else reads these.
    With the target's `fingerprint` an engine with another one refuses the head; other readers ignore it.
    Tables of the target's are left out. vLLM wants an output layer with each head that cannot name every
    token: give such a head one of its own (`own_head`). Makes the folder; raises OSError, and ModelError for
    weights that are no finite numbers.
    """
    config = head.config
    state = head.state_dict()
    floats = torch.float32 if dtype == torch.int8 else dtype
    tensors = {name: state[name].detach().cpu().to(floats).contiguous() for name in head_shapes(config)}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the head's tensor {name!r} holds values that are no finite {floats} numbers")
    if dtype == torch.int8:
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
            tensors[name], tensors[name + SCALE] = _rows_as_int8(tensors[name])
    tensors |= {name: state[name].cpu() for name in ("d2t", "t2d") if name in state}
    named = str(floats).removeprefix("torch.")
    described = config_to_speculators(config, verifier=verifier, architectures=architectures, dtype=named)
    if fingerprint is not None:
        described[FINGERPRINT] = fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    _write(folder / "config.json", json.dumps(described, indent=2))


def _rows_as_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as whole numbers, and what to multiply each row by."""
    scale = (matrix.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / scale[:, None]).round().to(torch.int8), scale


def _write(path: Path, text: str) -> None:
    with NewFile(path, mode=0o644) as new:
        new.write(text.encode())
        new.keep()
