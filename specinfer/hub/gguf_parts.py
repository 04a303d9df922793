"""GGUF models that are split into several files, as llama.cpp's gguf-split writes them.

Parts are called NAME-00001-of-00003.gguf and so on. The first has the metadata, each some of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from specinfer.errors import ModelFileError
from specinfer.hub.gguf_header import GgufHeader, read_header

_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """The names of all parts of a model, one of whose files has this name; itself alone if that is no part's.

    A name may have folders before it.
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def first_parts(names: Iterable[str]) -> list[str]:
    """Of these files one for each model: of a split one the first part."""
    return sorted({part_names(name)[0] for name in names})


def part_files(path: Path) -> list[Path]:
    """The files of the model that this file is a part of, itself among them; those that are there."""
    return [file for name in part_names(path.name) if (file := path.with_name(name)).is_file()]


def read_gguf(path: Path) -> GgufHeader:
    """The head of a GGUF model, any part of which is named: the first part's, with those of the others.

    Raises ModelFileError as `read_header`, and where a part is missing or is of another model.
    """
    named = read_header(path)
    count = named.metadata.get("split.count", 1)
    if count in (0, 1):
        return named
    names = part_names(path.name)
    if len(names) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, and its name does not say so: call the parts "
            "NAME-00001-of-00002.gguf and so on, or merge them (llama-gguf-split --merge)"
        )
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, of which {missing[0]} is not beside it"
            + (f", nor are {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; fetch it, too"
        )
    parts = [named if path.name == name else read_header(path.with_name(name)) for name in names]
    for number, part in enumerate(parts):
        said = part.metadata.get("split.no"), part.metadata.get("split.count")
        if said != (number, count):
            raise ModelFileError(
                f"{part.path} says that it is part {said[0]} (from 0 on) of {said[1]}; fetch the model again"
            )
    tensors, wanted = sum(len(part.tensors) for part in parts), named.metadata.get("split.tensors.count")
    if wanted not in (None, tensors):
        raise ModelFileError(
            f"the parts of {parts[0].path} have {tensors} tensors of {wanted}; they are of different models, "
            "fetch all of them again"
        )
    return replace(parts[0], parts=tuple(parts[1:]))
