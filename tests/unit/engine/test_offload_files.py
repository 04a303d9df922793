"""Files that are damaged, change, fail or cannot be written while layers are streamed: no text is wrong."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM
from specinfer.engine import models as loading
from specinfer.errors import ModelError, ModelFileError
from specinfer.files import NewFile
from specinfer.kernels import disk
from specinfer.kernels.layout import Weight
from specinfer.models import prepared as preparing
from specinfer.models.prepared import NewPreparedFile
from specinfer.progress import NoProgress
from tests.engines import ENGINE, assert_idle
from tests.spies import spied
from tests.tiny_models import write_similar_llama
from tests.unit.engine import offloading
from tests.unit.engine.offloading import PROMPTS, Planned, fails, prepared_file, streamed, texts, wanted

pytestmark = pytest.mark.usefixtures("own_cache", "no_thread_is_left")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
        "was changed|ended at|changed from",
    ),
    "replaced": (lambda path: os.replace(shutil.copy(path, f"{path}.new"), path), "was replaced"),
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 1), "changed from|was changed"),
    "removed": (lambda path: path.unlink(), "disappeared"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_prepared_file_changes_in_use(change: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, (do, says) = wanted(model), CHANGES[change]
    with streamed(model, monkeypatch) as llm:
        begun = llm.stream(PROMPTS[0], offloading.PARAMS)
        next(begun)
        do(prepared_file(llm))
        end = [*begun][-1]
        assert end.finish_reason == "error"
        assert any(word in str(end.error) for word in says.split("|"))
        assert "load the model again" in str(end.error)
        assert_idle(llm)
    with streamed(model, monkeypatch) as llm:
        assert texts(llm) == want


@pytest.mark.parametrize("change", ["truncated", "replaced", "grown"])
def test_a_model_changes(change: str, model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, source, do = NewPreparedFile.write, model / "model.safetensors", CHANGES[change][0]
    changed: list[str] = []

    def changing(self: NewPreparedFile, name: str, weight: Weight) -> None:
        write(self, name, weight)
        if not changed:
            changed.append(name)
            do(source)

    with monkeypatch.context() as patch:
        patch.setattr(NewPreparedFile, "write", changing)
        with pytest.raises(ModelFileError, match=r"shorter while it was read|was changed while"):
            streamed(model, monkeypatch)
    assert [*(own_cache / "prepared").glob("*.safetensors")] == []


def flip(path: Path, record: str) -> None:
    """Change a byte in the middle of a record."""
    with path.open("r+b") as file:
        begin, length, _ = records_of(path)[record]
        file.seek(begin + length // 3)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def records_of(path: Path) -> dict[str, tuple[int, int, int]]:
    import json

    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: dict[str, tuple[int, int, int]] = json.loads(header["__metadata__"]["records"])
    return found


@pytest.mark.parametrize("record", ["model.layers.1", "model.layers.2", "model.embed_tokens", "lm_head"])
def test_a_flipped_byte_is_found_at_the_start_and_made_anew(
    record: str, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want, plan = wanted(model), Planned((1, 3))
    with streamed(model, monkeypatch, plan) as llm:
        path = prepared_file(llm)
        assert texts(llm) == want
    flip(path, record)
    with streamed(model, monkeypatch, plan) as llm:
        assert texts(llm) == want
    [line] = caplog.messages
    assert line.startswith(f"a prepared model is made again: {path}")


@pytest.mark.parametrize(("kind", "record"), [("int4", "model.layers.2"), ("floats", "model.layers.1")])
def test_a_flipped_byte_of_a_self_draft_or_of_its_target(
    kind: str,
    record: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Layers in the shared memory come from the new file."""
    want, options = wanted(model), {"offload_folder": str(tmp_path / "disk")}
    with streamed(model, monkeypatch, Planned(self_draft=True), **options) as llm:
        assert texts(llm) == want
    flip(next((tmp_path / "disk").glob(f"*-{kind}-*.safetensors")), record)
    with streamed(model, monkeypatch, Planned(self_draft=True), **options) as llm:
        assert texts(llm) == want
        assert llm.models.draft_memory.give_to_layers()
        assert texts(llm.variant(drafts=())) == want
    assert len(caplog.messages) == 1


def test_a_folder_that_takes_no_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_prepare.py has full disks."""
    folder = tmp_path / "disk"
    options: dict[str, Any] = {"offload_folder": str(folder)}
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "locked", fails(errno.EROFS))
        with pytest.raises(ModelError, match=r"cannot be prepared in .*disk: .*--offload-folder"):
            streamed(model, monkeypatch, **options)
    assert [*folder.glob("*.safetensors*")] == []
    with streamed(model, monkeypatch, **options) as llm:
        want = texts(llm)
    with monkeypatch.context() as patch:  # the existing file is read
        patch.setattr(preparing, "locked", fails(errno.EROFS))
        with streamed(model, monkeypatch, **options) as llm:
            assert texts(llm) == want


@pytest.mark.parametrize("lacks", ["tmpfs", "O_DIRECT", "locks"])
def test_odd_file_systems(lacks: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, folder = wanted(model), tmp_path / "disk"
    if lacks == "tmpfs":
        shm = Path("/dev/shm")
        if not os.access(shm, os.W_OK):
            pytest.skip("no /dev/shm")
        folder = shm / f"specinfer-{os.getpid()}"
    elif lacks == "O_DIRECT":
        monkeypatch.setattr(disk, "_open_direct", lambda path: None)
    else:
        monkeypatch.setattr("filelock.FileLock.acquire", fails(errno.ENOLCK))
    try:
        with streamed(model, monkeypatch, offload_folder=str(folder)) as llm:
            assert texts(llm) == want
            assert prepared_file(llm).parent == folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.thorough
def test_a_disk_that_fails_ends_the_requests_of_a_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = wanted(model)
    with streamed(model, monkeypatch) as llm:
        begun = [llm.stream(prompt, offloading.PARAMS) for prompt in PROMPTS]
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_two_engines_share_one_file(model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, made = wanted(model), spied(monkeypatch, NewFile, "keep", lambda file, **_: file._path.name)
    monkeypatch.setattr(loading, "plan_memory", Planned())
    options: dict[str, Any] = {**ENGINE, "kernels": "native", "offload": "auto", "progress": NoProgress()}
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: LLM(model, **options), range(2))
        with one, two:
            assert prepared_file(one) == prepared_file(two)
            for _ in range(2):
                assert [*pool.map(texts, (one, two))] == [want, want]
    assert len([name for name in made if name.endswith(".safetensors")]) == 1
