"""Memory that is a twin's, or that of layers of its target: its bytes, and faults while it changes hands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specinfer.errors import DamagedFileError, ModelFileError
from specinfer.kernels.disk import PAGE, StreamSource
from specinfer.kernels.layout import Int4Weight, Int8Weight
from specinfer.models.lent_memory import LentMemory
from specinfer.models.prepared import PreparedFile
from specinfer.models.stream import LayerStream
from specinfer.models.stream_buffers import StreamRecord
from specinfer.models.streamed import layer_records
from specinfer.models.weights import open_model, prepare
from tests.kernels import kernels
from tests.streams import disk
from tests.tiny_models import write_tiny_llama

LAYERS = 6


@pytest.fixture
def files(tmp_path: Path, own_cache: Path) -> tuple[PreparedFile, PreparedFile]:
    """A target in int8, and its twin in int4."""
    native = kernels("native")
    model = open_model(write_tiny_llama(tmp_path / "model", num_layers=LAYERS))
    target, twin = (
        prepare(model, dtype=torch.bfloat16, kernels=native, quantization=kind) for kind in ("int8", "int4")
    )
    return target, twin


@pytest.fixture
def lent(files: tuple[PreparedFile, PreparedFile]) -> Iterator[LentMemory]:
    target, twin = files
    names = layer_records(target)
    found = LentMemory(twin, [*layer_records(twin), "lm_head"], target, names, disk(piece=2 * PAGE))
    records = [
        StreamRecord(one.offset, one.length, one.crc, name)
        for name in names
        for one in (target.records[name],)
    ]
    with LayerStream(StreamSource(target.path), records, buffers=2, disk=disk()) as stream:
        found.serve(stream, target, names)
        yield found


def layers_are_right(lent: LentMemory, target: PreparedFile) -> bool:
    """Whether the memory holds the layers that it is for."""
    content, names = target.path.read_bytes(), layer_records(target)
    records = {number: target.records[names[number]] for number in lent.layers}
    return all(
        bytes(memory) == content[records[n].offset : records[n].offset + records[n].length]
        for n, memory in lent.layers.items()
    )


def twin_is_right(lent: LentMemory, twin: PreparedFile) -> bool:
    """Whether the memory holds the twin: a matrix of its first layer and its output layer."""
    for name, kind in (
        ("model.layers.0.mlp.down_proj.weight", Int4Weight),
        ("model.embed_tokens.weight", Int8Weight),
    ):
        there = lent.weight(name, kind)
        assert there is not None
        read = kind(*(torch.empty_like(tensor) for tensor in there))
        twin.read(name, read)
        if not all(map(torch.equal, there, read)):
            return False
    return True


def test_either_is_there_whole(lent: LentMemory, files: tuple[PreparedFile, PreparedFile]) -> None:
    target, twin = files
    assert 1 < len(lent.layers) < LAYERS
    for _ in range(2):
        assert (lent.holder, twin_is_right(lent, twin)) == ("draft", True)
        assert not layers_are_right(lent, target)
        lent.lend()
        assert (lent.holder, layers_are_right(lent, target)) == ("layers", True)
        assert lent.take_back()
    size = target.records[layer_records(target)[0]].length
    assert lent.streamed_bytes == (LAYERS - len(lent.layers)) * size


def test_a_matrix_that_has_no_place_there(lent: LentMemory) -> None:
    assert lent.weight("model.norm.weight", Int8Weight) is None
    assert lent.weight("model.layers.0.mlp.down_proj.weight", Int8Weight) is None, "it is another kind"


def test_memory_that_is_kept_is_the_drafts(lent: LentMemory) -> None:
    lent.lend()
    lent.keep()
    assert (lent.holder, lent.can_be_lent) == ("draft", False)
    lent.lend()
    assert lent.holder == "draft"


def test_files_that_cannot_be_read(
    lent: LentMemory,
    files: tuple[PreparedFile, PreparedFile],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, twin = files

    def fail(*given: object) -> None:
        raise ModelFileError("the disk has failed")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(StreamSource, "read_into", fail)
        lent.lend()
        assert lent.holder == "neither", "it may be half of either"
        assert not lent.can_be_lent, "it is not tried in every step"
        lent.lend()
        assert not lent.take_back()
    assert [record.message for record in caplog.records] == 2 * [
        "cannot exchange a draft and layers of its target: the disk has failed"
    ]
    assert lent.take_back()
    assert twin_is_right(lent, twin)
    lent.lend()
    assert lent.holder == "layers"
    with monkeypatch.context() as patch:
        patch.setattr(StreamSource, "read_into", fail)
        assert not lent.take_back()
    assert lent.holder == "neither", "its layers are streamed again"


def test_a_twin_that_is_damaged_is_found(
    files: tuple[PreparedFile, PreparedFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, twin = files
    record = twin.records["lm_head"]
    with twin.path.open("r+b") as file:
        file.seek(record.offset + 5)
        file.write(b"\xff\x00\xff")
    names = layer_records(target)
    with pytest.raises(DamagedFileError, match="wrong checksum"):
        LentMemory(twin, ["lm_head"], target, names, disk())
