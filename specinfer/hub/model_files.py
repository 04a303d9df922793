"""Model files on disk: their paths, checks, and recommended sampling parameters."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specinfer.errors import ModelFileError
from specinfer.hub.foreign_format import INSTEAD, foreign_files, foreign_gguf
from specinfer.hub.gguf_choice import choose_gguf
from specinfer.hub.gguf_header import GgufHeader, check_complete, part_files, read_gguf

_MAX_JSON = 32 << 20  # bytes; an index of 100,000 tensors takes a third of that
_SINGLE = "model.safetensors"
TEMPLATES: Final = "additional_chat_templates"  # folder with more templates, as transformers writes them
PICKLES = (".bin", ".pt", ".pth")  # suffixes of pickled weights, which are refused
# Beginnings of names of training state, and of weights that other programs alone read.
_ELSEWHERE: Final = (
    *("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states"),
    *("consolidated", "rank", "qmodel", "openvino"),
)
_PIECES, _PIECE = 256, 4096  # hashed pieces per file, and bytes per piece
_FILE: Final = "generation_config.json"
# Field of SamplingParams -> key in GGUF files, check, and allowed values for error messages.
_KNOWN: Final[Mapping[str, tuple[str, Callable[[float], bool], str]]] = {
    "temperature": ("temp", lambda t: t >= 0, "a number >= 0"),
    "top_k": ("top_k", lambda k: k == int(k) and k >= -1, "an integer >= 0"),
    "top_p": ("top_p", lambda p: 0 < p <= 1, "a number in (0, 1]"),
    "min_p": ("min_p", lambda p: 0 <= p <= 1, "a number in [0, 1]"),
    "repetition_penalty": ("penalty_repeat", lambda x: 0.001 <= x <= 1000, "a number in [0.001, 1000]"),
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: a folder with config.json and safetensors, or a GGUF model and its header."""

    name: str  # as the user gave it
    path: Path  # folder, or (first) GGUF file
    weights: tuple[Path, ...]  # files with its tensors
    header: GgufHeader | None = field(default=None, compare=False, repr=False)  # None for a folder


def local_model(name: str, path: Path) -> ModelFiles:
    """Return the model at a local path: a folder, a GGUF file, or any part of a split GGUF model.

    A folder with GGUF files and no safetensors gives Q4_K_M or the nearest to it.

    Raises ModelFileError if the folder lacks a file, or the file is not a complete GGUF file.
    """
    if path.is_dir():
        if (path / "pool.json").is_file() and not (path / "config.json").is_file():
            raise ModelFileError(f"{name} is a pool of drafts, not a model: give it in drafts")
        if (what := foreign_files(file.name for file in path.iterdir())) is not None:
            raise ModelFileError(f"{name} is {what}")
        if (gguf := _gguf_in(path)) is None:
            return ModelFiles(name, path, weight_files(path))
        path = gguf
    if path.stat().st_size == 0:
        raise ModelFileError(f"{path} is empty; fetch it again")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        hint = " (give its folder)" if path.suffix in (".safetensors", ".json", *PICKLES) else ""
        raise ModelFileError(f"{path} is not a GGUF file; allowed: a .gguf file, or a model's folder{hint}")
    header = read_gguf(path)
    if (what := foreign_gguf(header.metadata)) is not None:
        raise ModelFileError(f"{name} is {what}")
    check_complete(header)
    return ModelFiles(name, header.path, (header.path, *(part.path for part in header.parts)), header)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model's folder: those in its index, or else the single file.

    Raises ModelFileError if config.json or one of these files is missing.
    """
    if not (folder / "config.json").is_file():
        raise ModelFileError(
            f"{folder} is not a model: it has no config.json; give a model's folder or a .gguf file"
        )
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (folder / _SINGLE).is_file():
            return (folder / _SINGLE,)
        advice = instead(file.name for file in folder.iterdir())
        raise ModelFileError(f"{folder} has neither {_SINGLE} nor {index.name}; {advice}")
    names = _indexed(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelFileError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files ({missing[0]}, ...); "
            "fetch the model again"
        )
    return tuple(folder / name for name in names)


def files_of(model: Path) -> list[Path]:
    """Return the existing files of a model, from its folder or any part of its GGUF model."""
    if model.is_dir():
        return [model / "config.json", *sorted(model.glob("*.safetensors"))]
    return part_files(model)


def hash_of(model: Path) -> str:
    """Return a hash of a model's file sizes and of evenly spaced pieces; independent of the paths.

    It distinguishes models, and quantizations of one model, in about 10 ms. It does not detect a single
    wrong byte.
    """
    found = hashlib.sha256()
    for path in files_of(model):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(size.to_bytes(8, "little"))
            for at in sorted({number * size // _PIECES for number in range(_PIECES)}):
                file.seek(at)
                found.update(file.read(_PIECE))
    return found.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model; raises ModelFileError if it holds something else."""
    try:
        size = path.stat().st_size
        value = json.loads(path.read_text(encoding="utf-8")) if size <= _MAX_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if size > _MAX_JSON:
        raise ModelFileError(f"{path} has {size} bytes; allowed: {_MAX_JSON}. Fetch the model again")
    if not isinstance(value, dict):
        raise ModelFileError(
            f"{path} holds a {type(value).__name__}, expected an object; fetch the model again"
        )
    return value


def has_pickles(files: Iterable[str]) -> bool:
    """Return whether some of the files are pickled weights of the model."""
    return any(name.endswith(PICKLES) and not name.startswith(_ELSEWHERE) for name in files)


def instead(files: Iterable[str]) -> str:
    """Return advice for a folder with these files and without weights under the expected names."""
    files = sorted(name for name in files if "/" not in name and not name.startswith(_ELSEWHERE))
    whole = [name for name in files if name.endswith(".safetensors")]
    if whole:
        return f"if {whole[0]} is the whole model, rename it to model.safetensors"
    pickles = [name for name in files if name.endswith(PICKLES)]
    if not pickles:
        return f"fetch the model again, or {INSTEAD}"
    which = (
        "pytorch_model*.bin" if len(pickles) > 1 and pickles[0].startswith("pytorch_model") else pickles[0]
    )
    return (
        f"convert {', '.join(pickles[:8])} to safetensors, as pickled weights can run any code and are never "
        f'read: python -c "import glob, torch; from safetensors.torch import save_file; save_file({{k: '
        f"v.contiguous().clone() for f in glob.glob('{which}') for k, v in torch.load(f, weights_only=True)"
        f".items()}}, 'model.safetensors', metadata={{'format': 'pt'}})\""
    )


def _gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors, as of a repository; None if it has none."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return None
    name = choose_gguf(f"{folder}/", (file.name for file in folder.glob("*.gguf")))
    return None if name is None else folder / name


def _indexed(index: Path) -> list[str]:
    """Return the distinct file names in an index, sorted."""
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name or name in ("", "..")]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            f"{index} is damaged ({type(error).__name__}: {error}); fetch the model again"
        ) from error
    if outside:
        raise ModelFileError(
            f"{index} names {outside[0]!r}; allowed: files in the same folder. "
            "Get the model from another source"
        )
    if not names:
        raise ModelFileError(f"{index} names no file; fetch the model again")
    return names


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """Return the model's recommended SamplingParams values by field name.

    They come from generation_config.json or GGUF metadata; {} if there are none. `do_sample: false` means
    temperature 0. Raises ModelFileError for a value out of range.
    """
    if files.header is not None:
        source, greedy = f"{files.path}: general.sampling, ", False
        given = {
            name: files.header.metadata.get(f"general.sampling.{key}") for name, (key, *_) in _KNOWN.items()
        }
    elif (file := files.path / _FILE).is_file():
        found = read_json(file)
        source, greedy = f"{file}: ", found.get("do_sample") is False
        given = {name: found.get(name) for name in _KNOWN}
    else:
        return {}
    if greedy:  # ignore top_k, top_p and min_p
        given = {"temperature": 0.0, "repetition_penalty": given["repetition_penalty"]}
    return {name: _checked(source, name, value) for name, value in given.items() if value is not None}


def _checked(source: str, name: str, value: Any) -> float:
    _, ok, allowed = _KNOWN[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53
    if not number or not math.isfinite(value) or not ok(value):
        raise ModelFileError(
            f"{source}{name} is {repr(value)[:80]}; allowed: {allowed}. Correct the file, or ignore it with "
            "generation_config none"
        )
    return max(0, int(value)) if name == "top_k" else float(value)
