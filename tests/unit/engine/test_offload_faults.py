"""Disks, files and users that fail while layers are streamed: somebody hears why, and nothing hangs."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.engine import models as loading
from specinfer.errors import ModelError, ModelFileError
from specinfer.files import NewFile
from specinfer.kernels import disk
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.kernels.layout import Weight
from specinfer.models import prepared as preparing
from specinfer.models import stream as streams
from specinfer.models import streamed as streaming
from specinfer.models.placement import Placement
from specinfer.models.prepared import NewPreparedFile
from specinfer.progress import NoProgress
from tests.engines import ENGINE, assert_idle, engine_of
from tests.kernels import kernels
from tests.tiny_models import write_similar_llama, write_tiny_llama
from tests.unit.engine.offloading import Planned, resident, streamed, until

pytestmark = pytest.mark.usefixtures("own_cache", "no_thread_is_left")

PROMPTS = [[9, 8, 7, 6], [3] * 20, [50, 2]]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    kernels("native")
    return write_tiny_llama(tmp_path / "model", num_layers=4, tokenizer=True)


class Reads:
    """What happens to reads of layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()  # reads wait until it is set
        self.open.set()
        self.stalled = threading.Event()  # one waits
        self.delay = 0.0
        happens = self

        class Source(StreamSource):
            def read_into(self, view: memoryview, offset: int) -> None:
                if not happens.open.is_set():
                    happens.stalled.set()
                happens.open.wait()
                time.sleep(happens.delay)
                super().read_into(view, offset)

        monkeypatch.setattr(streaming, "StreamSource", Source)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.error for output in outputs if output.error] == []
    assert_idle(llm)
    return [output.token_ids for output in outputs]


def wanted(model: Path) -> list[tuple[int, ...]]:
    with resident(model) as llm:
        return texts(llm)


def prepared_file(llm: LLM) -> Path:
    plan = llm.models.plan
    assert plan is not None
    return plan.prepared.path


def fails(number: int) -> Callable[..., Any]:
    def fail(*args: object, **more: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


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
            assert end.error is not None
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
    assert any("is not asked again" in line for line in caplog.messages)
    caplog.clear()  # of an error that leads to the models


def test_a_disk_that_stalls_is_waited_for_with_a_word(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want, reads = wanted(model), Reads(monkeypatch)
    monkeypatch.setattr(streams, "_PATIENCE", 0.05)
    with streamed(model, monkeypatch) as llm, ThreadPoolExecutor(1) as pool:
        reads.open.clear()
        answer = pool.submit(texts, llm)
        assert reads.stalled.wait(10)
        until(lambda: caplog.messages != [])
        assert not answer.done()
        reads.open.set()
        assert answer.result(30) == want
        [line] = caplog.messages
        assert line.startswith("waiting for the disk: ")
        # Two layers may have been read ahead.
        assert re.search(rf" MB of model\.layers\.[0-2] of {re.escape(str(prepared_file(llm)))} after ", line)


def test_a_disk_a_thousand_times_slower_than_computing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, reads = wanted(model), Reads(monkeypatch)
    with streamed(model, monkeypatch, Planned((2,)), lookup=True) as llm:
        reads.delay = 0.02
        assert texts(llm) == want
        assert llm.statistics().stream_wait_seconds > 0.02
    slow = DiskRate(1, 4096, 1e6, direct=True)
    line = Placement(1 << 40, {}, [2**30] * 3, 2, (0, 1, 2)).told(slow, Path("/disk"))
    assert line.endswith("3.2 GB a pass at 1.0 MB/s from /disk, about 3221 s a pass")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
        "got shorter|ended at|went from",
    ),
    "replaced": (lambda path: os.replace(shutil.copy(path, f"{path}.new"), path), "was replaced"),
    "grown": (lambda path: os.truncate(path, path.stat().st_size + 1), "went from"),
    "removed": (lambda path: path.unlink(), "went away"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_prepared_file_that_changes_while_it_is_read(
    change: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, (do, says) = wanted(model), CHANGES[change]
    with streamed(model, monkeypatch) as llm:
        begun = llm.stream(PROMPTS[0], PARAMS)
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
def test_a_model_that_changes_while_it_is_prepared(
    change: str, model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert line.startswith(f"a prepared model is made anew: {path}: ")


def test_a_flipped_byte_of_a_drafts_embeddings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft, folder = write_similar_llama(model, tmp_path / "draft"), tmp_path / "disk"
    options: dict[str, Any] = {"drafts": (str(draft),), "offload_folder": str(folder)}
    with streamed(model, monkeypatch, **options) as llm:
        want = texts(llm)
    assert len([*folder.glob("*.safetensors")]) == 2
    flip(next(folder.glob("draft-*.safetensors")), "model.embed_tokens")
    with streamed(model, monkeypatch, **options) as llm:
        assert texts(llm) == want
    assert len(caplog.messages) == 1


def test_damage_that_comes_again_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, kept = NewFile.keep, list[Path]()

    def damage(self: NewFile, **options: bool) -> None:
        keep(self, **options)
        kept.append(self._path)
        flip(self._path, "model.layers.1")

    monkeypatch.setattr(NewFile, "keep", damage)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1 has a wrong checksum"):
        streamed(model, monkeypatch)
    assert len(kept) == 2


def test_a_damaged_file_that_cannot_be_removed_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(model, monkeypatch) as llm:
        path = prepared_file(llm)
    flip(path, "model.layers.0")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fails(errno.EROFS))
        with pytest.raises(
            ModelFileError, match=r"Read-only file system.*name another folder with --offload"
        ):
            streamed(model, monkeypatch)


@pytest.mark.parametrize("how", ["before", "while it is written", "read-only"])
def test_a_folder_that_takes_no_file(
    how: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    options: dict[str, Any] = {"offload_folder": str(folder)}
    with monkeypatch.context() as patch:
        if how == "before":
            patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        elif how == "while it is written":
            patch.setattr(NewFile, "write", fails(errno.ENOSPC))
        else:
            patch.setattr(preparing, "locked", fails(errno.EROFS))
        with pytest.raises(ModelError, match=r"cannot be prepared in .*disk: .*--offload-folder"):
            streamed(model, monkeypatch, **options)
    assert [*folder.glob("*.safetensors*")] in ([], [*folder.glob("*.lock")])
    with streamed(model, monkeypatch, **options) as llm:
        want = texts(llm)
    with monkeypatch.context() as patch:  # what is there is read
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


def test_an_llm_and_its_variant_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = wanted(model)
    with (
        streamed(model, monkeypatch, Planned(twin=True)) as llm,
        llm.variant(drafts=()) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(2):
            assert [*pool.map(texts, (llm, other))] == [want, want]


def test_closing_does_not_wait_for_the_disk_nor_for_a_variants_pass(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, reads = wanted(model), Reads(monkeypatch)
    with streamed(model, monkeypatch) as llm, ThreadPoolExecutor(2) as pool:
        other = llm.variant(lookup=True)
        reads.open.clear()
        first = pool.submit(texts, llm)
        assert reads.stalled.wait(10)
        second = pool.submit(other.generate, PROMPTS, PARAMS)  # whose pass waits for its turn
        until(lambda: bool(engine_of(other)._launched))
        began = time.monotonic()
        other.close()
        assert time.monotonic() - began < 2
        assert "closed" in str(second.exception(5))
        reads.open.set()
        assert first.result(30) == want


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import pytest
from specinfer import SamplingParams
from tests.engines import assert_idle
from tests.unit.engine.offloading import Planned, streamed
from tests.unit.engine.test_offload_faults import PARAMS, PROMPTS, Reads, texts

patch = pytest.MonkeyPatch()
reads = Reads(patch)
options = {"tree_size": "cost", "clock": "curve"} if sys.argv[2] == "twin" else {}
llm = streamed(Path(sys.argv[1]), patch, Planned(twin=sys.argv[2] == "twin"), **options)
want = texts(llm)
longest = 0.0
for number in range(3):
    begun = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    for one in begun:
        next(one)
    reads.delay = 0.15  # of each piece: a layer takes 0.45 s
    time.sleep(0.01 * number)
    sent = []
    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        if number == 2:  # somebody who is in a hurry
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        [*begun[0]]
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        heard = time.monotonic()
        longest = max(longest, heard - sent[0])
    try:
        timer.join()
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
    reads.delay = 0.0
    found = [[*one][-1].token_ids for one in begun[1:]]
    assert found == want[1:], (found, want)
    assert_idle(llm)
    assert texts(llm) == want
llm.close()
print(f"longest {longest:.3f}")
"""


@pytest.mark.parametrize("guesses", ["twin", "nobody"])
def test_ctrl_c_in_mid_pass(guesses: str, model: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model), guesses],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split()[-1]) < 0.6, "behind a layer, not behind the pass"
