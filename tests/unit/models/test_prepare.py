"""Preparing a model: a matrix at a time, once for all processes, whole or not at all."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from specinfer.errors import DamagedFileError, ModelError, ModelFileError
from specinfer.files import NewFile
from specinfer.kernels.layout import Weight
from specinfer.models.open_model import open_model
from specinfer.models.prepared import NewPreparedFile, PreparedFile
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.weight_reader import WeightReader, file_bytes
from specinfer.models.weights import prepare
from specinfer.progress import Progress
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.kernels import kernels
from tests.loading import load
from tests.parity.families import save_random
from tests.shown import Shown
from tests.spies import spied
from tests.tiny_models import write_tiny_llama

KINDS: list[Quantization] = ["none", "int8", "int4"]


def prepared(folder: Path, quantization: Quantization, progress: Progress | None = None) -> PreparedFile:
    """The file of a model, in a folder beside it."""
    return prepare(
        open_model(folder),
        dtype=torch.float32,
        kernels=kernels("native"),
        quantization=quantization,
        cache=folder.parent / "prepared",
        progress=progress,
    )


def logits(
    folder: Path, quantization: Quantization, cache: str = "prepared", ids: Sequence[int] | None = None
) -> Tensor:
    """Return the logits of an ordinary start."""
    model = load(folder, quantization=quantization, cache=folder.parent / cache, logit_ids=ids)
    return ModelRunner(model, num_blocks=1, block_size=4).forward([Rows((3, 1, 4), 0, [0], 0)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "m", intermediate_size=72)


@pytest.mark.few(5)
@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "gemma3", "opt"])
def test_a_prepared_model_computes_the_same_bits(
    family: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    save_random(family, folder, tied=family == "gemma3")
    want = logits(folder, quantization, "elsewhere")
    prepared(folder, quantization)
    read = spied(monkeypatch, SafetensorsFolder, "read_rows", lambda _, name, *__: name)
    assert torch.equal(logits(folder, quantization), want)
    shapes = open_model(folder).shapes
    assert [name for name in read if len(shapes[name]) > 1] == []


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_chosen_logits_of_a_prepared_model(quantization: Quantization, tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", tie_embeddings=tied)
    found = prepared(folder, quantization)
    assert [*found.records] == ["model.embed_tokens", "lm_head", "model.layers.0", "model.layers.1"]
    for ids in ([5, 0, 63, *range(20)], [*range(41)]):
        assert torch.equal(logits(folder, quantization, ids=ids), logits(folder, quantization)[:, ids])


def test_an_ordinary_start_makes_the_same_file_but_none_of_floats(folder: Path) -> None:
    logits(folder, "none")
    assert not (folder.parent / "prepared").exists()
    for quantization in KINDS[1:]:
        path = prepared(folder, quantization).path
        logits(folder, quantization, "elsewhere")
        assert (folder.parent / "elsewhere" / path.name).read_bytes() == path.read_bytes()


def test_progress_of_preparing(folder: Path) -> None:
    shown = Shown()
    for _ in range(2):  # made, then there
        prepared(folder, "int8", shown)
    opened = open_model(folder)
    matrices = [name for name, shape in opened.shapes.items() if len(shape) > 1]
    assert shown.works == [("preparing m", file_bytes(opened, matrices))]


@pytest.mark.parametrize("quantization", KINDS)
def test_no_more_than_one_matrix_is_in_memory(
    quantization: Quantization, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Tensor]] = []
    read = WeightReader.read

    def watched(self: WeightReader, names: Sequence[str], into: Weight) -> None:
        assert [tensor for tensor in seen if tensor() is not None] == []
        seen.extend(map(weakref.ref, into))
        read(self, names, into)

    monkeypatch.setattr(WeightReader, "read", watched)
    prepared(folder, quantization)
    assert len(seen) >= 10


def test_of_two_that_prepare_a_model_one_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits, writes = threading.Event(), NewPreparedFile.write
    made: list[str] = []

    def slow(self: NewPreparedFile, name: str, weight: Weight) -> None:
        made.append(name)
        assert waits.wait(30)
        writes(self, name, weight)

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waits.set()

    logger, heard = logging.getLogger("specinfer.models.prepared"), Heard()
    monkeypatch.setattr(NewPreparedFile, "write", slow)
    logger.addHandler(heard)
    found: list[PreparedFile] = []
    threads = [threading.Thread(target=lambda: found.append(prepared(folder, "int8"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    logger.removeHandler(heard)
    assert len(made) == len(set(made)) + 1  # the tied table is there twice
    assert [file.records for file in found] == [found[0].records] * 2
    [line] = caplog.messages
    assert line == f"waiting for another process to make {found[0].path}"


@pytest.mark.parametrize("old", ["another version", "without states"])
def test_an_old_file_of_a_hybrid_is_made_anew(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, write = tmp_path / "m", NewPreparedFile.write
    save_random("qwen3.5", folder, tied=False)
    want = logits(folder, "int4", "elsewhere")

    def without_states(self: NewPreparedFile, name: str, weight: Weight) -> None:
        if ".mixer." not in name:
            write(self, name, weight)

    with monkeypatch.context() as patch:
        if old == "another version":
            patch.setattr("specinfer.models.prepared._VERSION", 3)
        else:
            patch.setattr(NewPreparedFile, "write", without_states)
        path = prepared(folder, "int4").path
    assert torch.equal(logits(folder, "int4"), want)
    assert path.read_bytes() == (tmp_path / "elsewhere" / path.name).read_bytes()
    assert [line.startswith("a damaged prepared model is made again: ") for line in caplog.messages] == (
        [] if old == "another version" else [True]
    )


def full(monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Fill the disk; returns what is said of it."""
    if how == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
        return "has 0.00 GB free"
    monkeypatch.setattr(NewFile, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    return "No space left on device"


@pytest.mark.parametrize("how", ["before", "while it is written"])
def test_a_full_disk_ends_preparing_and_costs_an_ordinary_start_its_file_only(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = logits(folder, "int8", "before")
    said = full(monkeypatch, how)
    with pytest.raises(
        ModelError, match=f"^m cannot be prepared in .*prepared: .*{said}; make room .* --offload-folder$"
    ):
        prepared(folder, "int8")
    assert [path.suffix for path in (folder.parent / "prepared").iterdir()] == [".lock"]
    assert torch.equal(logits(folder, "int8", "elsewhere"), want)
    [line] = caplog.messages
    assert line.startswith("the prepared model is not kept for the next start: ")
    assert said in line


def test_a_folder_that_cannot_be_written_to(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "prepared").write_text("a file")
    with pytest.raises(ModelError, match=r"File exists.*--offload-folder"):
        prepared(folder, "int8")
    logits(folder, "int8")
    assert len(caplog.messages) == 1


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: 1 << 20] + bytes([data[1 << 20] ^ 1]) + data[(1 << 20) + 1 :])


def test_a_damaged_file_that_cannot_be_removed_is_not_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = logits(folder, "int8")
    damage(prepared(folder, "int8").path)
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "read-only")))
    assert torch.equal(logits(folder, "int8"), want)
    [line] = caplog.messages
    assert "is made again" in line


def test_damage_of_what_was_made_anew_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find a damaged file; one rebuilds it, and the other finds that damaged, too."""
    damage(prepared(folder, "int8").path)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    with pytest.raises(ModelFileError, match="wrong checksum; the disk may be failing") as caught:
        logits(folder, "int8")
    assert isinstance(caught.value, DamagedFileError)


def test_damage_in_floats_is_read_from_the_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = logits(folder, "none")
    path = prepared(folder, "none").path
    damage(path)
    assert torch.equal(logits(folder, "none"), want)
    assert not path.exists()
    assert len(caplog.messages) == 1
