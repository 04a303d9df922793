"""Memory that is a twin's, and then that of layers of its target: its bytes, and faults of the disk."""

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
    records = target.stream_records(names)
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
        read = kind(*(torch.empty_like(tensor) for tensor in there))
        twin.read(name, read)
        if not all(map(torch.equal, there, read)):
            return False
    return True


def test_layers_get_the_memory_once(
    draft_memory: DraftMemory, files: tuple[PreparedFile, PreparedFile]
) -> None:
    target, twin = files
    assert 1 < len(draft_memory.layers) < LAYERS
    assert twin_is_right(draft_memory, twin)
    assert not layers_are_right(draft_memory, target)
    assert draft_memory.give_to_layers()
    assert draft_memory.given
    assert layers_are_right(draft_memory, target)
    assert not draft_memory.give_to_layers()
    assert not draft_memory.keep(), "the draft is gone"
    size = target.records[layer_records(target)[0]].length
    assert draft_memory.streamed_bytes == (LAYERS - len(draft_memory.layers)) * size


def test_a_draft_that_others_use_is_kept(
    draft_memory: DraftMemory, files: tuple[PreparedFile, PreparedFile]
) -> None:
    assert draft_memory.keep()
    assert not draft_memory.layers_may_use
    assert not draft_memory.give_to_layers()
    assert twin_is_right(draft_memory, files[1])


def test_layers_that_cannot_be_read_are_streamed(
    draft_memory: DraftMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise ModelFileError("the disk has failed")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(StreamSource, "read_into", fail)
        assert not draft_memory.give_to_layers()
    assert draft_memory.given, "some of the draft may be overwritten"
    assert not draft_memory.layers_may_use
    assert caplog.messages == [
        "cannot read layers over a draft, which no longer guesses: the disk has failed"
    ]
    stream = draft_memory._stream
    with stream.passing():
        assert all(stream.take(number) < 2 for number in range(LAYERS))


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
