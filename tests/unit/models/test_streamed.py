"""Streamed layers compute what layers in memory do, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.kernels.disk import DiskRate
from specinfer.models.open_model import open_model
from specinfer.models.placement import Placement
from specinfer.models.shard import Shard
from specinfer.models.streamed import layer_records
from specinfer.models.weights import load_streamed, prepare
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.kernels import kernels
from tests.loading import load
from tests.parity.families import save_random

DISK = DiskRate(readers=2, piece=4096, bytes_per_second=1e9, direct=True)
TAPS = (0, 1, 2)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "gemma3", "opt", "gemma4", "gemma3n"])
def test_every_placement_gives_the_same_bits(
    family: str, kind: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
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
