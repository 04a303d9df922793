"""An interrupt while an engine starts: it comes out, no half file stays, and the next start works."""

from __future__ import annotations

from pathlib import Path

import pytest

from specinfer import LLM, SamplingParams
from specinfer.progress import NoProgress
from tests.engines import ENGINE, write_tiny

PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=8)
OPTIONS = {**ENGINE, "quantization": "int8", "tree_size": "cost"}


class Interrupted(NoProgress):
    """Raises KeyboardInterrupt at the n-th word of progress."""

    def __init__(self, place: int) -> None:
        self.left = place

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        self._heard()

    def advance(self, n: int) -> None:
        self._heard()

    def _heard(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.thorough
def test_an_interrupted_start_leaves_nothing_half_done(tmp_path: Path, own_cache: Path) -> None:
    write_tiny(tmp_path / "models")
    target, draft = str(tmp_path / "models/target"), str(tmp_path / "models/similar")

    def start(place: int) -> LLM:
        return LLM(target, drafts=(draft,), progress=Interrupted(place), **OPTIONS)

    place = 0
    while True:
        try:
            llm = start(place)
        except KeyboardInterrupt:
            place += 1
            continue
        break
    assert place > 10, "loading, quantizing and measuring are heard of"
    with llm, LLM(target, progress=NoProgress(), **OPTIONS) as alone:
        assert (
            llm.generate([[1, 2, 3]], PARAMS)[0].token_ids == alone.generate([[1, 2, 3]], PARAMS)[0].token_ids
        )
    left = [path for path in own_cache.rglob("*") if path.is_file() and "kernels" not in path.parts]
    assert {path.suffix for path in left} <= {".json", ".safetensors", ".bin", ".lock"}, left
