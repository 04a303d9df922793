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
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.open_model import open_model
from specinfer.models.prepared import PreparedFile
from specinfer.models.stream import LayerStream
from specinfer.models.stream_buffers import StreamRecord
from specinfer.models.streamed import layer_records
from specinfer.models.weights import prepare
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
def draft_memory(files: tuple[PreparedFile, PreparedFile]) -> Iterator[DraftMemory]:
    target, twin = files
    names = layer_records(target)
    found = DraftMemory(twin, [*layer_records(twin), "lm_head"], target, names, disk(piece=2 * PAGE))
    records = [
        StreamRecord(one.offset, one.length, one.crc, name)
        for name in names
        for one in (target.records[name],)
    ]
    with LayerStream(StreamSource(target.path), records, buffers=2, disk=disk()) as stream:
        found.serve(stream, target, names)
        yield found


def layers_are_right(draft_memory: DraftMemory, target: PreparedFile) -> bool:
    """Whether the memory holds the layers that it is for."""
    content, names = target.path.read_bytes(), layer_records(target)
    records = {number: target.records[names[number]] for number in draft_memory.layers}
    return all(
        bytes(memory) == content[records[n].offset : records[n].offset + records[n].length]
        for n, memory in draft_memory.layers.items()
    )


def twin_is_right(draft_memory: DraftMemory, twin: PreparedFile) -> bool:
    """Whether the memory holds the twin: a matrix of its first layer and its output layer."""
    for name, kind in (
        ("model.layers.0.mlp.down_proj.weight", Int4Weight),
        ("model.embed_tokens.weight", Int8Weight),
    ):
        there = draft_memory.weight(name, kind)
        assert there is not None
        read = kind(*(torch.empty_like(tensor) for tensor in there))
        twin.read(name, read)
        if not all(map(torch.equal, there, read)):
            return False
    return True


def test_either_is_there_whole(draft_memory: DraftMemory, files: tuple[PreparedFile, PreparedFile]) -> None:
    target, twin = files
    assert 1 < len(draft_memory.layers) < LAYERS
    for _ in range(2):
        assert (draft_memory.holder, twin_is_right(draft_memory, twin)) == ("draft", True)
        assert not layers_are_right(draft_memory, target)
        draft_memory.give_to_layers()
        assert (draft_memory.holder, layers_are_right(draft_memory, target)) == ("layers", True)
        assert draft_memory.give_to_draft()
    size = target.records[layer_records(target)[0]].length
    assert draft_memory.streamed_bytes == (LAYERS - len(draft_memory.layers)) * size


def test_files_that_cannot_be_read(
    draft_memory: DraftMemory,
    files: tuple[PreparedFile, PreparedFile],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, twin = files

    def fail(*given: object) -> None:
        raise ModelFileError("the disk has failed")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(StreamSource, "read_into", fail)
        draft_memory.give_to_layers()
        assert draft_memory.holder == "neither", "it may be half of either"
        assert not draft_memory.layers_may_use, "it is not tried in every step"
        draft_memory.give_to_layers()
        assert not draft_memory.give_to_draft()
    assert [record.message for record in caplog.records] == 2 * [
        "cannot exchange a draft and layers of its target: the disk has failed"
    ]
    assert draft_memory.give_to_draft()
    assert twin_is_right(draft_memory, twin)
    draft_memory.give_to_layers()
    assert draft_memory.holder == "layers"
    with monkeypatch.context() as patch:
        patch.setattr(StreamSource, "read_into", fail)
        assert not draft_memory.give_to_draft()
    assert draft_memory.holder == "neither", "its layers are streamed again"


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
        DraftMemory(twin, ["lm_head"], target, names, disk())
