"""Heads of every kind for one tiny target, as engines load them and as plain modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer.heads.checkpoint import AnyHeadModel, HeadFolder
from specinfer.models.open_model import open_model
from tests.engines import Tiny, write_tiny
from tests.heads import tiny_head, write_tiny_head
from tests.unit.engine.heads.head_engines import HEADS, AnyHead, load


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="package")
def tiny(folder: Path) -> Tiny:
    return write_tiny(folder, num_layers=3)


@pytest.fixture(scope="package")
def heads(folder: Path, tiny: Tiny) -> dict[str, AnyHeadModel]:
    return {
        name: load(tiny, folder, write_tiny_head(tiny_head(config, seed=number), folder / f"head{number}"))[1]
        for number, (name, config) in enumerate(HEADS.items())
    }


@pytest.fixture(scope="package")
def modules(folder: Path, heads: dict[str, AnyHeadModel]) -> dict[str, AnyHead]:
    """The same heads as plain modules, with the same tables."""
    target = open_model(folder / "target")
    return {
        name: HeadFolder(folder / f"head{number}", target.config).module(target)
        for number, name in enumerate(heads)
    }
