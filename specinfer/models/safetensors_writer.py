"""Writing safetensors files: whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.files import NewFile

_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, mode: int = 0o644) -> None:
    """Write these tensors, on the CPU and contiguous, to `path`, which gets its name when it is whole.

    `mode` is who may read and write it. Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    pieces: list[bytes | memoryview] = []
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        pieces.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path, mode=mode) as new:
        new.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            new.write(piece)
        new.keep()
