"""ModelFiles: where a model lies on disk, and the checks that it is one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specinfer.errors import ModelFileError
from specinfer.hub.gguf_header import check_complete, read_header


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: a folder with config.json and safetensors, or one GGUF file."""

    name: str  # as the user gave it
    path: Path
    kind: Literal["folder", "gguf"]


def local_model(name: str, path: Path) -> ModelFiles:
    """The model in a local folder or GGUF file.

    Raises ModelFileError when the folder lacks a file, or the file is not a whole GGUF.
    """
    if path.is_dir():
        check_folder(path)
        return ModelFiles(name, path, "folder")
    if path.stat().st_size == 0:
        raise ModelFileError(f"{path} is empty; fetch it again")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        hint = " (give the folder it lies in)" if path.suffix in (".safetensors", ".json") else ""
        raise ModelFileError(f"{path} is not a GGUF file; allowed: a .gguf file, or a model's folder{hint}")
    check_complete(read_header(path, vocabulary=False))
    return ModelFiles(name, path, "gguf")


def check_folder(folder: Path) -> None:
    """Raise ModelFileError unless the folder holds config.json and every safetensors file it needs."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        if ggufs:
            raise ModelFileError(
                f"{folder} has no config.json but GGUF files; give one of them: "
                + ", ".join(str(folder / name) for name in ggufs[:8])
            )
        raise ModelFileError(
            f"{folder} is not a model: it has no config.json; give a model's folder or a .gguf file"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelFileError(f"{index} is damaged ({error}); fetch the model again") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ModelFileError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files ({missing[0]}, ...); "
                "fetch the model again"
            )
    elif next(folder.glob("*.safetensors"), None) is None:
        raise ModelFileError(
            f"{folder} has no *.safetensors; weights are read from safetensors or GGUF: convert the model"
        )
