"""Experts that are read when they are chosen compute what experts in memory do, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import DamagedFileError
from specinfer.models.expert_stream import HALF_LIFE
from specinfer.models.open_model import open_model
from specinfer.models.shard import Shard
from specinfer.models.stream import StoppedError
from specinfer.models.weights import prepare
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.gguf_blocks import write_blocks
from tests.kernels import kernels
from tests.loading import load
from tests.offloading import load_experts
from tests.parity.families import save_random
from tests.tiny_models import write_tiny_mixture

pytestmark = pytest.mark.thorough

ROWS = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0), Rows((2, 7), 0, [2], 1)]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    "family", ["qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "gemma4-experts", "llama4"]
)
def test_any_number_of_slots_gives_the_same_bits(
    family: str, kind: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
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
