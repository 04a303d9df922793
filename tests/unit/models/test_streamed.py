"""Streamed layers and experts compute what those in memory do, to the bit; faults of the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import DamagedFileError, ModelFileError
from specinfer.kernels.disk import PAGE, DiskRate, StreamSource
from specinfer.kernels.layout import Int4Weight, Int8Weight
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.expert_stream import HALF_LIFE
from specinfer.models.open_model import open_model
from specinfer.models.placement import Placement
from specinfer.models.prepared import PreparedFile
from specinfer.models.shard import Shard
from specinfer.models.stream import LayerStream, StoppedError
from specinfer.models.streamed import layer_records
from specinfer.models.weights import load_streamed, prepare
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.gguf_blocks import write_blocks
from tests.kernels import kernels
from tests.loading import load
from tests.offloading import load_experts
from tests.parity.families import save_random
from tests.streams import disk
from tests.tiny_models import write_tiny_llama, write_tiny_mixture

DISK = DiskRate(readers=2, piece=4096, bytes_per_second=1e9, direct=True)
TAPS = (0, 1, 2)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "gemma3", "opt", "gemma4", "gemma3n"])
def test_every_placement(family: str, kind: Quantization, dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(family, tmp_path / "model", tied=family == "gemma3")
    model, native = open_model(tmp_path / "model"), kernels("native")
    whole_sums = kind == "int8" or model.config.layers_differ
    part = None if whole_sums else Shard(0, 1, 3).of(model.config)  # sums of floats have parts
    options: dict[str, Any] = {"dtype": dtype, "kernels": native, "quantization": kind}
    rows = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0), Rows((2, 7), 0, [2], 1)]
    whole = ModelRunner(load(model, cache=tmp_path, part=part, **options), num_blocks=3, block_size=4)
    want, has_taps = whole.forward(rows), model.config.altup is None  # heads read one stream alone
    taps = whole.launch(rows, taps=TAPS).tapped(TAPS) if has_taps else None
    prepared = prepare(model, cache=tmp_path, **options)
    layers = [prepared.records[name].length for name in layer_records(prepared)]
    for streamed in ((0,), (len(layers) - 1,), tuple(range(len(layers)))):
        for buffers in (1, 2, 3):
            placement = Placement(1 << 30, {}, layers, buffers, streamed)
            for in_memory in (False, True):
                made = load_streamed(
                    model, prepared, placement, DISK, table_in_memory=in_memory, part=part, **options
                )
                runner = ModelRunner(made, num_blocks=3, block_size=4)
                for _ in range(3):
                    assert torch.equal(runner.forward(rows), want)
                    if taps is not None:
                        assert torch.equal(runner.launch(rows, taps=TAPS).tapped(TAPS), taps)
                made.stream.close()


# Experts, which are read when they are chosen.


ROWS = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0), Rows((2, 7), 0, [2], 1)]


@pytest.mark.thorough
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "family", ["qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "gemma4-experts", "llama4"]
)
def test_any_number_of_slots(family: str, kind: Quantization, dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(family, tmp_path, tied=False)
    model, native = open_model(tmp_path), kernels("native")
    whole_sums = kind == "int8" or model.config.layers_differ
    part = None if whole_sums else Shard(0, 1, 3).of(model.config)  # sums of floats have parts
    options: dict[str, Any] = {"dtype": dtype, "kernels": native, "quantization": kind, "part": part}
    want = ModelRunner(load(model, **options), num_blocks=3, block_size=4).forward(ROWS)
    least = model.config.experts.count
    for slots in (least, least + 1, 3 * least):
        made = load_experts(tmp_path, slots, **options)
        runner = ModelRunner(made, num_blocks=3, block_size=4)
        for _ in range(3):
            assert torch.equal(runner.forward(ROWS), want)
        made.stream.close()


@pytest.mark.thorough
def test_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"blk.0.ffn_down.weight": "Q6_K"}, "Q4_K", experts=4)
    whole = load(path, quantization="gguf")
    for slots in (4, 5):
        made = load_experts(path, slots, quantization="gguf", cache=tmp_path / "kept")
        with made.stream:
            want, got = (ModelRunner(one, num_blocks=3, block_size=4).forward(ROWS) for one in (whole, made))
        assert torch.equal(got, want)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_mixture(tmp_path, experts=8, per_token=2, expert_size=64, num_layers=3, hidden_size=64)


@pytest.mark.thorough
def test_only_chosen_experts_are_read_and_those_in_memory_are_not(folder: Path) -> None:
    made = load_experts(folder, 8)
    stream = made.stream
    runner, [record] = ModelRunner(made, num_blocks=3, block_size=4), {r.length for r in stream._records}
    with stream:
        assert stream.read_bytes == 24 * record  # all of them, to be checked
        row = [Rows((3,), 0, [0], 0)]
        for _ in range(2):  # eight slots hold the six experts of a row
            runner.forward(row)
        before = stream.read_bytes
        runner.forward(row)
        assert stream.read_bytes == before
        runner.forward([Rows((9,), 0, [0], 0)])
        assert 0 < stream.read_bytes - before <= 6 * record
        assert (stream.read_bytes - before) % record == 0


@pytest.mark.thorough
def test_the_least_used_expert_makes_room(folder: Path) -> None:
    made = load_experts(folder, 8)
    stream = made.stream

    def read(*records: int) -> int:
        """Use these records in a pass; returns how many were read."""
        before = stream.read_bytes
        with stream.passing():
            stream.want(records)
            for record in records:
                stream.take(record)
        return (stream.read_bytes - before) // stream._records[0].length

    others = range(8, 15)
    with stream:
        read(*range(8))
        for _ in range(3):
            assert read(0) == 0
        assert read(*others) == 7  # in place of all but 0
        assert read(0) == 0
        for _ in range(10 * HALF_LIFE):
            assert read(*others) == 0
        assert read(1) == 1  # in place of 0, whose uses were long ago
        assert read(*others) == 0
        assert read(0) == 1


@pytest.mark.thorough
def test_a_damaged_expert_is_found_at_the_start(folder: Path) -> None:
    model = open_model(folder)
    prepared = prepare(model, dtype=torch.float32, kernels=kernels("native"), cache=folder / "kept")
    record = prepared.records["model.layers.1.mlp.experts.5"]
    with prepared.path.open("r+b") as file:
        file.seek(record.offset + 100)
        octet = file.read(1)
        file.seek(record.offset + 100)
        file.write(bytes([octet[0] ^ 1]))
    with pytest.raises(DamagedFileError, match=r"model\.layers\.1\.mlp\.experts\.5 has a wrong checksum"):
        load_experts(folder, 8)


@pytest.mark.thorough
def test_a_pass_that_is_stopped_leaves_nothing_behind(folder: Path) -> None:
    made = load_experts(folder, 8)
    with made.stream:
        runner = ModelRunner(made, num_blocks=3, block_size=4)
        want = runner.forward(ROWS)
        for last in range(1, 6):
            asked = iter(range(1, 100))
            with pytest.raises(StoppedError):
                runner.launch(ROWS, stopped=lambda asked=asked, last=last: next(asked) >= last)
            assert torch.equal(runner.forward(ROWS), want)


# Memory that is a twin's, and then that of layers of its target.


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


def test_layers_get_memory_once(draft_memory: DraftMemory, files: tuple[PreparedFile, PreparedFile]) -> None:
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


def test_a_shared_draft_is_kept(draft_memory: DraftMemory, files: tuple[PreparedFile, PreparedFile]) -> None:
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


def test_a_damaged_twin(files: tuple[PreparedFile, PreparedFile], monkeypatch: pytest.MonkeyPatch) -> None:
    target, twin = files
    record = twin.records["lm_head"]
    with twin.path.open("r+b") as file:
        file.seek(record.offset + 5)
        file.write(b"\xff\x00\xff")
    names = layer_records(target)
    with pytest.raises(DamagedFileError, match="wrong checksum"):
        DraftMemory(twin, ["lm_head"], target, names, disk())
