"""Model files on disk: their paths and checks, pools of drafts, and recommended sampling parameters."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.files import write_text
from specinfer.hub.foreign_format import INSTEAD, foreign_files, foreign_gguf
from specinfer.hub.gguf_header import GgufHeader, check_complete, first_parts, part_files, read_gguf

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
# The choice of one GGUF file among those of a repository or folder.
_DEFAULT: Final = "Q4_K_M"
# Beginnings of names in falling order of preference: the default, near ones, more bits, fewer bits.
_ORDER: Final = (
    *(_DEFAULT, "Q4_K_S", "Q4_K", "Q4_1", "Q4", "IQ4", "MXFP4", "Q5_K_M", "Q5", "Q6", "Q8"),
    *("Q3_K_L", "Q3_K", "Q3", "IQ3", "BF16", "F16", "FP16", "Q2", "IQ2", "F32", "FP32"),
)
_TAG: Final = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]{1,3})*|TQ\d_\d|B?F(?:P)?(?:16|32)|MXFP4(?:_MOE)?)(?![A-Z0-9])",
    re.IGNORECASE,
)
_BESIDE: Final = ("mmproj", "imatrix")  # in names of files beside a language model
_SHOWN: Final = 12  # names in an error
# A pool: a folder of drafts tuned together, whose names its pool.json lists: ["member1", "member2"].
POOL_FILE: Final = "pool.json"
MAX_MEMBERS: Final = 16
_MAX_POOL: Final = 1 << 16
_MEMBER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


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
        if (gguf := _gguf_in(model)) is None:
            return [model / "config.json", *sorted(model.glob("*.safetensors"))]
        model = gguf
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


def choose_gguf(place: str, names: Iterable[str], tag: str | None = None) -> str | None:
    """Return the file, or the first part, of the quantization `tag`, such as Q4_K_M; None: no GGUF model.

    Without a tag, or with "latest", the choice is Q4_K_M or the nearest that there is. `place` comes
    before names in errors: "org/name:" or "folder/". Raises ModelNotFoundError if no file has the tag, or
    several have it.
    """
    files = _models(names)
    if not files or tag in (None, "latest"):
        tags = sorted({quantization_of(name) for name in files}, key=_rank)
        chosen = [name for name in files if quantization_of(name) == tags[0]]
    else:
        assert tag is not None
        wanted = tag.upper()
        chosen = [name for name in files if quantization_of(name) in (wanted, f"UD-{wanted}")]
        chosen = [name for name in chosen if quantization_of(name) == wanted] or chosen
        chosen = chosen or [name for name in files if wanted in _base(name).upper()]
    if len(chosen) < 2 and (chosen or not files):
        return chosen[0] if chosen else None
    what = f"no GGUF file of {tag}; it has" if not chosen else "several GGUF models; choose one of"
    listed = [f"{place}{name}" for name in chosen or files]
    more = ", ..." if len(listed) > _SHOWN else ""
    raise ModelNotFoundError(f"{place[:-1]} has {what} {', '.join(listed[:_SHOWN])}{more}")


def other_tags(names: Iterable[str], chosen: str) -> list[str]:
    """Return the quantizations of the other models among these files, the nearest to the default first."""
    return sorted(
        {quantization_of(name) for name in _models(names)} - {quantization_of(chosen), ""}, key=_rank
    )


def _models(names: Iterable[str]) -> list[str]:
    """Return the language models among GGUF files, each by its first part."""
    return [name for name in first_parts(names) if not any(word in _base(name).lower() for word in _BESIDE)]


def quantization_of(name: str) -> str:
    """Return the quantization in the name of a GGUF file, in capitals; "" if it has none."""
    found = _TAG.findall(_base(name)) or _TAG.findall(name)
    return found[-1].upper() if found else ""


def _base(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".gguf")


def _rank(tag: str) -> tuple[int, str]:
    plain = tag.removeprefix("UD-")
    place = next((at for at, start in enumerate(_ORDER) if plain.startswith(start)), len(_ORDER))
    return place, tag


def pool_members(folder: Path) -> list[Path]:
    """Return the folders of a pool's members; none if `folder` holds no pool.

    Members are folders beside pool.json, with heads or small models. The file is untrusted: its names must be
    plain, members must not be pools, and their number is limited.
    Raises ModelFileError if the list is damaged, or a member is missing, a link to elsewhere, or a pool.
    """
    path = folder / POOL_FILE
    if not path.is_file():
        return []
    names: Any = None
    with path.open("rb") as file:
        data = file.read(_MAX_POOL + 1)
    if len(data) <= _MAX_POOL:
        with suppress(ValueError, RecursionError):
            names = json.loads(data)
    plain = isinstance(names, list) and all(isinstance(one, str) and _MEMBER.fullmatch(one) for one in names)
    if not plain or not 1 <= len(names) <= MAX_MEMBERS or len({*names}) < len(names):
        raise ModelFileError(
            f"{path} is no list of drafts; allowed: 1 to {MAX_MEMBERS} different names of folders beside it"
        )
    members = [folder / name for name in names]
    for member in members:
        if not member.is_dir():
            raise ModelFileError(f"{folder} has no folder {member.name}, which its {POOL_FILE} names")
        if member.resolve().parent != folder.resolve():
            raise ModelFileError(
                f"{member} is a link to another place; allowed: members in the pool's own folder"
            )
        if (member / POOL_FILE).exists():
            raise ModelFileError(f"{member} is a pool; allowed: members that are heads or small models")
    return members


def write_pool(folder: Path, members: Sequence[str]) -> None:
    """Write pool.json atomically; raises OSError."""
    write_text(folder / POOL_FILE, json.dumps([*members]))
