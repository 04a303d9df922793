"""Kept quantized matrices: read again, or made anew when anything about them is not right."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specinfer.kernels.layout import FloatTable, Int4Weight, Int8Weight, Weight
from specinfer.kernels.quantized import quantize_int4, quantize_int8
from specinfer.models.quantization_cache import (
    DamagedCacheError,
    KeptMatrices,
    NewMatrices,
    cache_path,
    identity,
)
from tests.tiny_models import write_tiny_llama

MADE_FROM = {"made_by": "a test", "model": "m"}
_START = 8 + (1 << 20)  # of the first tensor


def make_int8() -> Int8Weight:
    return quantize_int8(torch.randn(20, 40, generator=torch.Generator().manual_seed(0)))


def make_int4() -> Int4Weight:
    return quantize_int4(torch.randn(20, 40, generator=torch.Generator().manual_seed(1)))


def make_table() -> FloatTable:
    return FloatTable(torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).bfloat16())


def empty(like: Weight) -> Weight:
    """Memory for such a matrix."""
    return type(like)(*(torch.empty_like(tensor) for tensor in like))


def write(path: Path) -> Path:
    with NewMatrices(path, MADE_FROM) as new:
        new.write("a", make_int8())
        new.write("c", make_table())
        new.write("b", make_int4())
        new.finish()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "folder" / "kept.safetensors")


def test_what_was_written_is_read(file: Path) -> None:
    kept = KeptMatrices.open(file, MADE_FROM)
    assert kept is not None
    for name, want in (("a", make_int8()), ("b", make_int4()), ("c", make_table())):
        got = empty(want)
        kept.read(name, got)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_matrix_is_read_into_the_middle_of_a_buffer(file: Path) -> None:
    kept, want = KeptMatrices.open(file, MADE_FROM), make_int8()
    assert kept is not None
    buffer, scales = torch.full((4, 16, 16, 4), 7, dtype=torch.uint8), torch.zeros(4, 16)
    kept.read("a", Int8Weight(buffer[1:3], scales[1:3]))
    assert torch.equal(buffer[1:3], want.values)
    assert buffer[[0, 3]].eq(7).all()
    assert torch.equal(scales[1:3], want.scales)


def test_it_is_a_safetensors_file_and_alone_in_its_folder(file: Path) -> None:
    assert list(file.parent.iterdir()) == [file]
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {"a.values", "a.scales", "b.levels", "b.scales", "b.zeros", "c.rows"}
        assert torch.equal(opened.get_tensor("b.levels"), make_int4().levels)
        assert opened.metadata()["made_by"] == "a test"


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def replace(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old.encode(), new.encode(), 1)


@pytest.mark.parametrize(
    "damage",
    {
        "nothing left": lambda data: b"",
        "shorter than its header": lambda data: data[:1000],
        "without tensors": lambda data: data[:_START],
        "one byte short": lambda data: data[:-1],
        "one byte long": lambda data: data + b"\0",
        "another length of the header": flip(1),
        "no JSON": flip(8),
        "another format": lambda data: b"GGUF" + data[4:],
        "another version": replace("a test", "a rest"),
        "no metadata": replace("__metadata__", "__metacraft_"),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_file_that_is_not_whole_or_of_another_kind_is_not_opened(
    file: Path, damage: tuple[str, Callable[[bytes], bytes]]
) -> None:
    file.write_bytes(damage[1](file.read_bytes()))
    assert KeptMatrices.open(file, MADE_FROM) is None


@pytest.mark.parametrize(
    "damage",
    {
        "the first byte": flip(_START),
        "the last byte": flip(-1),
        "a byte between": flip(_START + 700),
        "another type of the same size": replace('"dtype": "U8"', '"dtype": "I8"'),
        "another shape of the same size": replace('"shape": [2, 16, 16, 4]', '"shape": [16, 2, 16, 4]'),
        "another shape": replace('"shape": [2, 16, 16, 4]', '"shape": [2, 16, 16, 5]'),
        "an unknown type": replace('"dtype": "U8"', '"dtype": "U9"'),
        "another name": replace('"a.values": {', '"a.valves": {'),
    }.items(),
    ids=lambda item: item[0],
)
def test_damage_is_found_when_it_is_read(file: Path, damage: tuple[str, Callable[[bytes], bytes]]) -> None:
    before = file.read_bytes()
    after = damage[1](before) if damage[0] != "the last byte" else before[:-1] + bytes([before[-1] ^ 1])
    assert after != before
    file.write_bytes(after)
    kept = KeptMatrices.open(file, MADE_FROM)
    assert kept is not None
    name, like = ("b", make_int4()) if damage[0] == "the last byte" else ("a", make_int8())
    with pytest.raises(DamagedCacheError, match=rf"kept\.safetensors: {name}\.\w+ "):
        kept.read(name, empty(like))


def test_a_file_of_another_model_is_not_opened(tmp_path: Path) -> None:
    models = [write_tiny_llama(tmp_path / name) for name in ("one", "two")]
    one, two = (identity(model, "int8", torch.float32) for model in models)
    assert one != two
    assert one != identity(models[0], "int4", torch.float32)
    assert one != identity(models[0], "int8", torch.bfloat16)
    places = [
        cache_path(model, quantization, dtype, tmp_path)
        for model in models
        for quantization in ("int8", "int4")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert len(set(places)) == 8
    weights = models[0] / "model.safetensors"
    state = weights.stat()
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert identity(models[0], "int8", torch.float32) != one


def test_without_finish_nothing_is_left(tmp_path: Path) -> None:
    with NewMatrices(tmp_path / "kept.safetensors", MADE_FROM) as new:
        new.write("a", make_int8())
    assert list(tmp_path.iterdir()) == []


def test_a_file_takes_the_place_of_an_older_one(file: Path) -> None:
    file.write_bytes(b"old")
    write(file)
    assert KeptMatrices.open(file, MADE_FROM) is not None


def test_what_a_killed_process_left_is_removed_after_a_day(file: Path) -> None:
    old, fresh, other = (
        file.with_name(name) for name in (f"{file.name}.a.partial", f"{file.name}.b.partial", "x.c.partial")
    )
    for left in (old, fresh, other):
        left.write_bytes(b"half a model")
    for left in (old, other):
        os.utime(left, (0, 0))
    write(file)
    assert not old.exists()
    assert fresh.exists()
    assert other.exists()


def test_a_full_disk_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        """A disk that takes a header's room and nothing else."""

        def __init__(self, number: int) -> None:
            self._number = number

        def seek(self, position: int) -> int:
            return position

        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            os.close(self._number)

    monkeypatch.setattr("specinfer.files.os.fdopen", lambda number, mode, buffering: Full(number))
    with NewMatrices(tmp_path / "kept.safetensors", MADE_FROM) as new:
        new.write("a", make_int8())
        new.write("b", make_int4())
        new.finish()
    assert list(tmp_path.iterdir()) == []
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("the quantized model is not kept for the next start: ")
    assert "No space left" in line


def test_a_folder_that_cannot_be_made_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    with NewMatrices(tmp_path / "taken" / "kept.safetensors", MADE_FROM) as new:
        new.write("a", make_int8())
        new.finish()
    assert len(caplog.records) == 1
    assert (tmp_path / "taken").read_text() == "a file"


def test_headers_are_small(file: Path) -> None:
    """80 layers of four matrices fit the room for the header many times over."""
    header = json.loads(file.read_bytes()[8:_START])
    assert len(json.dumps(header)) / 5 * (80 * 4 * 3) < (1 << 20) / 2
