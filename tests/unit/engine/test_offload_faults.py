"""Failing disks and files while layers are streamed: errors are reported, and nothing hangs."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM
from specinfer.engine import models as loading
from specinfer.errors import ModelFileError
from specinfer.files import NewFile
from specinfer.progress import NoProgress
from tests.engines import ENGINE, assert_idle
from tests.tiny_models import write_similar_llama
from tests.unit.engine.offloading import (
    PARAMS,
    PROMPTS,
    Planned,
    fails,
    prepared_file,
    streamed,
    texts,
    wanted,
)

pytestmark = [pytest.mark.usefixtures("own_cache", "no_thread_is_left"), pytest.mark.thorough]


def test_a_disk_that_fails_in_mid_answer_ends_the_requests_of_the_step(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = wanted(model)
    with streamed(model, monkeypatch) as llm:
        begun = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        for one in begun:
            next(one)
        began = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails(errno.EIO))
            ends = [[*one][-1] for one in begun]
        assert time.monotonic() - began < 5
        for end in ends:
            assert end.finish_reason == "error"
            assert end.error.startswith("the model cannot be read: ")
            assert "Input/output error" in end.error
        assert_idle(llm)
        assert texts(llm) == want


def test_a_draft_whose_embeddings_cannot_be_read_guesses_no_more(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = wanted(model)
    draft = write_similar_llama(model, tmp_path / "draft")
    with streamed(model, monkeypatch, drafts=(str(draft),)) as llm:
        table = llm.models.drafts["draft"].table  # type: ignore[union-attr]
        rows = type(table).rows

        def failing(self: Any, token_ids: Any) -> Any:
            if self is table:
                raise ModelFileError("the disk fails")
            return rows(self, token_ids)

        monkeypatch.setattr(type(table), "rows", failing)
        assert texts(llm) == want
    assert any("failed and pauses" in line for line in caplog.messages)
    caplog.clear()  # drop records that refer to the models


def test_two_engines_prepare_one_file_and_stream_from_it(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, made = wanted(model), list[str]()
    keep = NewFile.keep

    def count(self: NewFile, **options: bool) -> None:
        keep(self, **options)
        made.append(self._path.name)

    monkeypatch.setattr(NewFile, "keep", count)
    monkeypatch.setattr(loading, "plan_memory", Planned())
    options: dict[str, Any] = {**ENGINE, "kernels": "native", "offload": "auto", "progress": NoProgress()}
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: LLM(model, **options), range(2))
        with one, two:
            assert prepared_file(one) == prepared_file(two)
            for _ in range(2):
                assert [*pool.map(texts, (one, two))] == [want, want]
    assert len([name for name in made if name.endswith(".safetensors")]) == 1
