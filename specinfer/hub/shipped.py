"""Draft heads that come with the package: small enough for it, each for one model of the catalogue."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

# The head's short name -> that of the model whose hidden states it reads.
SHIPPED_HEADS: Final = {"smollm2-135m-head": "smollm2-135m"}


def shipped_head(name: str) -> Path:
    """The folder of the head of that name, which is one of SHIPPED_HEADS."""
    return Path(str(files("specinfer"))) / "data" / "heads" / name


def heads_of(model: str) -> tuple[str, ...]:
    """The names of the heads that read this model of the catalogue; () for any other model."""
    return tuple(head for head, target in SHIPPED_HEADS.items() if target == model)
