"""Prepared files: read again to the bit, a record at a time, and damage is found."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specinfer.errors import DamagedFileError
from specinfer.kernels import layout
from specinfer.kernels.layout import FloatTable, Weight, lay_out_floats, quantize_int4, quantize_int8
from specinfer.models.prepared import NewPreparedFile, PreparedFile, identity, prepare_once, prepared_path
from tests.tiny_models import write_tiny_llama

MADE_FROM = {"made_by": "a test", "model": "m"}
START = 1 << 20  # of the first record
TABLE, QKV = "model.embed_tokens.weight", "layers.0.q.weight+layers.0.k.weight"
NAMES = (TABLE, QKV, "layers.0.g.weight", "layers.0.o.weight", "layers.1.q.weight")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def floats() -> layout.FloatWeight:
    weight = layout.empty_floats(20, 40, torch.bfloat16)
    lay_out_floats(random(20, 40).bfloat16(), weight)
    return weight


def contents() -> list[tuple[str, Weight]]:
    """A file of every kind: an embedding table, also used as output layer, and two layers."""
    return [
        (TABLE, FloatTable(random(5, 7).bfloat16())),
        (TABLE, quantize_int8(random(5, 7))),
        (QKV, quantize_int8(random(20, 40))),
        ("layers.0.g.weight", quantize_int4(random(5, 7))),  # its 16 zero points fill no line
        ("layers.0.o.weight", quantize_int4(random(20, 40))),
        ("layers.1.q.weight", floats()),
    ]


def empty(like: Weight) -> Weight:
    """Memory for such a matrix."""
    return type(like)(*(torch.empty_like(tensor) for tensor in like))


def raising(error: OSError) -> None:
    raise error


def new(
    path: Path, failed: Callable[[OSError], None] = raising, tensors: tuple[str, ...] = NAMES, size: int = 0
) -> NewPreparedFile:
    return NewPreparedFile(path, MADE_FROM, tensors, size, failed)


def write(path: Path, *weights: tuple[str, Weight]) -> Path:
    """Write these matrices, by default one of every kind."""
    given = weights or contents()
    path.parent.mkdir(exist_ok=True)
    with new(path, tensors=tuple(dict.fromkeys(name for name, _ in given))) as making:
        for name, weight in given:
            making.write(name, weight)
        making.finish()
    return path


def opened(path: Path) -> PreparedFile:
    file = PreparedFile.open(path, MADE_FROM)
    assert file is not None
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "folder" / "kept.safetensors")


def test_what_was_written_is_read(path: Path) -> None:
    file = opened(path)
    for name, want in contents():
        got = empty(want)
        file.read(name, got)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_it_is_a_safetensors_file_and_alone_in_its_folder(path: Path) -> None:
    assert list(path.parent.iterdir()) == [path]
    wanted = {
        f"{name}.{field}": tensor
        for name, weight in contents()
        for field, tensor in zip(weight._fields, weight, strict=True)
    }
    with safe_open(path, framework="pt") as file:
        assert {name for name in file.keys() if not name.startswith("padding.")} == {*wanted}  # noqa: SIM118
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in wanted.items())
        assert file.metadata()["made_by"] == "a test"


def test_a_layer_is_one_record_of_whole_pages(path: Path) -> None:
    records, data = opened(path).records, path.read_bytes()
    assert [*records] == ["model.embed_tokens", "lm_head", "layers.0", "layers.1"]
    assert [*records["layers.0"].tensors] == [
        *(f"{QKV}.{field}" for field in ("values", "scales")),
        *(f"layers.0.{name}.weight.{field}" for name in "go" for field in ("levels", "scales", "zeros")),
    ]
    end = START
    for record in records.values():
        assert record.offset == end
        assert record.length % 4096 == 0
        assert all(place.offset % 64 == 0 for place in record.tensors.values())
        assert zlib.crc32(data[end : end + record.length]) == record.crc
        end += record.length
    assert end == len(data)
    place = records["layers.0"].tensors["layers.0.o.weight.zeros"]
    at = records["layers.0"].offset + place.offset
    zeros = quantize_int4(random(20, 40)).zeros
    assert (place.dtype, place.shape) == (zeros.dtype, tuple(zeros.shape))
    assert data[at : at + zeros.nbytes] == zeros.numpy().tobytes()


def test_the_largest_scale_of_int4_is_known_without_reading(path: Path) -> None:
    shapes = {"layers.0.g.weight": (5, 7), "layers.0.o.weight": (20, 40)}
    wanted = {name: float(quantize_int4(random(*shape)).scales.max()) for name, shape in shapes.items()}
    assert opened(path).largest == wanted


def test_a_record_is_one_layer_alone(tmp_path: Path) -> None:
    names = [
        "layers.0.k.weight+layers.1.k.weight",
        "layers.0.q.weight",
        "norm_fc.weight",
        "layers.0.o.weight",
    ]
    found = opened(write(tmp_path / "kept", *((name, floats()) for name in names))).records
    assert [*found] == ["layers.0.k", "layers.0", "norm_fc", "layers.0.o"]


def test_a_larger_header_is_whole_pages_too(tmp_path: Path) -> None:
    names = [f"layers.{i}.{'x' * 500}" for i in range(700)]
    path = write(tmp_path / "kept", *((name, FloatTable(torch.ones(1))) for name in names))
    first = opened(path).records["layers.0"]
    assert first.offset > START
    assert first.offset % 4096 == 0
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor(f"{names[-1]}.rows"), torch.ones(1))


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def test_a_file_that_is_not_whole_or_of_another_kind_is_not_opened(path: Path) -> None:
    data = path.read_bytes()
    for what, damaged in {
        **{"nothing left": b"", "shorter than its header": data[:1000], "without tensors": data[:START]},
        **{"one byte short": data[:-1], "one byte long": data + b"\0", "another format": b"GGUF" + data[4:]},
        "another version": data.replace(b"a test", b"a rest", 1),
        "no checksum": data.replace(b'"header"', b'"hadder"', 1),
    }.items():
        path.write_bytes(damaged)
        assert PreparedFile.open(path, MADE_FROM) is None, what


def test_no_flipped_byte_of_the_header_goes_unnoticed(path: Path) -> None:
    data = path.read_bytes()
    end = len(data[:START].rstrip())
    for position in [*range(0, end, 11), end, START - 1]:
        path.write_bytes(flipped(data, position))
        assert PreparedFile.open(path, MADE_FROM) is None, position


def test_no_flipped_byte_of_a_tensor_goes_unnoticed(path: Path) -> None:
    file, data = opened(path), path.read_bytes()
    for name, like in contents():
        for field, tensor in zip(like._fields, like, strict=True):
            [record] = [r for r in file.records.values() if f"{name}.{field}" in r.tensors]
            first = record.offset + record.tensors[f"{name}.{field}"].offset
            for position in (first, first + tensor.nbytes // 2, first + tensor.nbytes - 1):
                path.write_bytes(flipped(data, position))
                with pytest.raises(DamagedFileError, match=r"has a wrong checksum; the disk may be failing"):
                    file.read(name, empty(like))


def test_what_is_not_there_is_not_read(path: Path) -> None:
    file = opened(path)
    with pytest.raises(DamagedFileError, match=r"layers\.7\.rows cannot be read"):
        file.read("layers.7", FloatTable(torch.empty(1)))
    with pytest.raises(DamagedFileError, match=r"it is torch\.bfloat16 \[5, 7\]"):
        file.read(TABLE, FloatTable(torch.empty(7, 5)))
    os.truncate(path, START)
    with pytest.raises(DamagedFileError, match="became shorter while it was read"):
        file.read(*contents()[0])
    path.unlink()
    with pytest.raises(DamagedFileError, match="No such file"):
        file.read(*contents()[0])


def test_a_file_of_another_model_is_not_opened(tmp_path: Path) -> None:
    models = [write_tiny_llama(tmp_path / name) for name in ("one", "two")]
    one, two = (identity(model, "int8", torch.float32) for model in models)
    assert one != two
    assert one != identity(models[0], "int4", torch.float32)
    assert one != identity(models[0], "int8", torch.bfloat16)
    places = [
        prepared_path(model, kind, dtype, tmp_path)
        for model in models
        for kind in ("int8", "int4", "floats")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert len(set(places)) == 12
    weights = models[0] / "model.safetensors"
    state = weights.stat()
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert identity(models[0], "int8", torch.float32) != one


def test_without_finish_nothing_is_left(tmp_path: Path) -> None:
    with new(tmp_path / "kept.safetensors") as making:
        making.write(*contents()[0])
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_by_who_has_the_lock(path: Path) -> None:
    left, other = (path.with_name(f"{name}.a.partial") for name in (path.name, "x"))
    for remains in (left, other):
        remains.write_bytes(b"half a model")
    path.unlink()
    with prepare_once(path, MADE_FROM, NAMES, 0, raising) as making:
        assert isinstance(making, NewPreparedFile)
    assert not left.exists()
    assert other.exists()


def test_the_disk_is_asked_for_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 3_000_000_000))
    failed = list[OSError]()
    with new(tmp_path / "kept.safetensors", failed.append, size=3_000_000_000) as making:
        making.write(*contents()[0])
        making.finish()
    assert list(tmp_path.iterdir()) == []
    assert str(failed[0]) == f"the prepared model may need 3.00 GB, {tmp_path} has 3.00 GB free"
    with new(tmp_path / "kept.safetensors", size=2_990_000_000) as making:
        making.write(*contents()[0])
        making.finish()
    opened(tmp_path / "kept.safetensors")
