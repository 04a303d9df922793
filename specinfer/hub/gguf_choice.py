"""The choice of one GGUF file among those of a repository or folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from specinfer.errors import ModelNotFoundError
from specinfer.hub.gguf_header import first_parts

DEFAULT: Final = "Q4_K_M"
# Beginnings of names in falling order of preference: the default, near ones, more bits, fewer bits.
_ORDER: Final = (
    *(DEFAULT, "Q4_K_S", "Q4_K", "Q4_1", "Q4", "IQ4", "MXFP4", "Q5_K_M", "Q5", "Q6", "Q8"),
    *("Q3_K_L", "Q3_K", "Q3", "IQ3", "BF16", "F16", "FP16", "Q2", "IQ2", "F32", "FP32"),
)
_TAG: Final = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]{1,3})*|TQ\d_\d|B?F(?:P)?(?:16|32)|MXFP4(?:_MOE)?)(?![A-Z0-9])",
    re.IGNORECASE,
)
_BESIDE: Final = ("mmproj", "imatrix")  # in names of files beside a language model
_SHOWN: Final = 12  # names in an error


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
