"""A small model, a separate cache, and the texts of a single process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from specinfer import LLM
from tests.parity.families import save_random
from tests.ranks import INT8, token_ids_of
from tests.tiny_models import write_similar_llama, write_tiny_llama

Saved: TypeAlias = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    shape = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 160}
    write_tiny_llama(folder / "target", tokenizer=True, **shape)
    write_similar_llama(folder / "target", folder / "draft", noise=0.1)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for a module's tests; compiled kernels are shared with others."""
    from specinfer.files import cache_dir

    kernels, own = cache_dir() / "kernels", tmp_path_factory.mktemp("cache")
    kernels.mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    before = os.environ.get("SPECINFER_CACHE")
    os.environ["SPECINFER_CACHE"] = str(own)
    yield
    os.environ.pop("SPECINFER_CACHE")
    if before is not None:
        os.environ["SPECINFER_CACHE"] = before


@pytest.fixture(scope="module")
def plain(folder: Path, cache: None) -> list[list[int]]:
    with LLM(folder / "target", **INT8) as llm:
        return token_ids_of(llm)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A random model of a family, saved once; the options of its config are the same in every call."""
    root = tmp_path_factory.mktemp("families")

    def save(family: str, **options: object) -> Path:
        path = root / family
        if not path.exists():
            written = root / f"{family}.part"  # left behind by an error
            save_random(family, written, tied=family in ("gemma3", "opt"), **options)
            written.rename(path)
        return path

    return save
