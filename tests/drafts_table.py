"""A table of known drafts for tiny models, and a folder with a target and its draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.hub.known_drafts import KnownDraft, ModelShape

from .tiny_models import write_tiny_llama

TABLE = (
    KnownDraft(
        target="Tiny-4L",
        shape=ModelShape("llama", 32, 4, 64),
        draft="nobody/Tiny-1L",
        gguf="",
        form="model",
        draft_shape=ModelShape("llama", 32, 1, 64),
        bytes=70_000,
        measured="",
    ),
)


def write_known_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Write a target and a smaller draft, whose pair is the only one known; return their folders."""
    monkeypatch.setattr("specinfer.hub.known_drafts.known_drafts", lambda: TABLE)
    target = write_tiny_llama(folder / "Tiny-4L", num_layers=4, tokenizer=True)
    return target, write_tiny_llama(folder / "Tiny-1L", num_layers=1, tokenizer=True)
