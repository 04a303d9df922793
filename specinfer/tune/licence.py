"""A target's licence, as far as its files say it: cards of drafts name it, and none is ever guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specinfer.hub.catalogue import CATALOGUE
from specinfer.hub.model_files import ModelFiles

_FRONT: Final = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)  # of a card: what hubs read
_FIELD: Final = re.compile(r"^(license(?:_name|_link)?):(.*)$", re.MULTILINE)
_HUB_ID: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # as hubs know licences
_UNNAMED: Final = ("other", "unknown", "none", "null", "~")  # what is no licence
_CARD: Final = 1 << 16  # characters of a card that are looked at
_LONGEST: Final = 200  # of a name or link


@dataclass(frozen=True, slots=True)
class Licence:
    """What a model is given under."""

    name: str
    link: str | None
    source: str  # what says so


def licence_of(files: ModelFiles) -> Licence | None:
    """The licence that a model's file, its card or specinfer's catalogue names; None: none of them does."""
    if files.header is not None:
        found = _named(
            *(files.header.metadata.get(f"general.license{part}") for part in ("", ".name", ".link")),
            source="its GGUF file",
        )
    else:
        fields = _front_matter(_read(files.path / "README.md"))
        found = _named(
            *(fields.get(f"license{part}") for part in ("", "_name", "_link")), source="its model card"
        )
    if found is None and files.name in CATALOGUE:
        return Licence(CATALOGUE[files.name].licence, None, "specinfer's catalogue")
    return found


def front_matter(licence: Licence | None) -> str:
    """The lines by which hubs know the licence of a card's target."""
    if licence is None:
        return "license: unknown"
    known = licence.name.lower()
    if _HUB_ID.fullmatch(known) and known not in _UNNAMED:
        return f"license: {known}"
    link = "" if licence.link is None else f"\nlicense_link: {json.dumps(licence.link)}"
    return f"license: other\nlicense_name: {json.dumps(licence.name)}{link}"


def _named(identifier: object, name: object, link: object, *, source: str) -> Licence | None:
    one, full, where = (_text(value) for value in (identifier, name, link))
    if one is None or one.lower() in _UNNAMED:
        one = full
    return None if one is None else Licence(one, where, source)


def _text(value: object) -> str | None:
    """One line of what a file says, or None where that is nothing."""
    if not isinstance(value, str):
        return None
    return " ".join(value.split())[:_LONGEST] or None


def _read(card: Path) -> str:
    """A model card's text; nothing where there is none that can be read."""
    try:
        return card.read_text("utf-8", "replace")[:_CARD]
    except OSError:
        return ""


def _front_matter(card: str) -> Mapping[str, str]:
    found = _FRONT.match(card)
    fields = {} if found is None else dict(_FIELD.findall(found[1]))
    return {key: value.partition(" #")[0].strip().strip("\"'[]") for key, value in fields.items()}
