"""Recurrent blocks on ranks, in stages and streamed: the bits of one process with all weights."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.placement import Placement
from specinfer.models.shard import Layout
from specinfer.models.streamed import layer_records
from specinfer.models.weights import load_model, load_streamed, prepare
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.speculation_config import Quantization
from specinfer.transport.group import Group
from specinfer.transport.link import Link
from tests.kernels import kernels
from tests.offloading import DISK
from tests.parity.families import save_random
from tests.ranks import CPU, parts_of, whole_model
from tests.states import StateRunner

WIDER = {"hidden_size": 64, "num_attention_heads": 4}
CASES = {
    "lfm2-biases": WIDER,
    "qwen3.5": {**WIDER, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "granite-hybrid": {**WIDER, "mamba_d_head": 32},
    "granite-hybrid-limits": {**WIDER, "mamba_d_head": 32},  # a norm over all heads
    "falcon-h1": {**WIDER, "mamba_d_ssm": 64},
    "falcon-h1-normed": {**WIDER, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "nemotron-h": WIDER,
}
PROMPT = [5, 17, 40, 3, 88, 61, 12]
TREE = Rows([12, 7, 20, 8, 8], 6, [1, 2, 3, 4], 0, [-1, 0, 0, 1, 2])


def hidden(model: LanguageModel) -> Tensor:
    """The output layer's inputs for a text's tree, in the order of its nodes."""
    model.group = None  # ranks run their passes side by side, without a leader's messages
    passes = StateRunner(model, num_blocks=10, block_size=4)
    passes.read([chain_rows(PROMPT[:6], 0, [1, 2, 3, 4], logits=False)])
    return passes.read([TREE])


def on_ranks(path: Path, cache: Path, quantization: Quantization, size: int) -> Tensor:
    """The same by ranks, in threads."""
    opened = open_model(path)
    layout = Layout.of(size, 1, [1] * opened.config.num_layers, 0, parts_of(quantization, size))
    pairs = [socket.socketpair() for _ in range(1, size)]
    links = [[Link(ours) for ours, _ in pairs], *([Link(its)] for _, its in pairs)]
    groups = [Group(rank, size, links[rank], bounds=layout.bounds) for rank in range(size)]
    models = [
        load_model(
            opened,
            dtype=torch.float32,
            device=CPU,
            kernels=kernels("native"),
            quantization=quantization,
            cache=cache,
            part=layout.part(rank, opened.config, whole_table=True),
            group=group,
        )
        for rank, group in enumerate(groups)
    ]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(Group.connect, groups))
        found = list(pool.map(hidden, models))
    for group in groups:
        group.close()
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_bits_of_one(name: str, quantization: Quantization, tmp_path: Path) -> None:
    save_random(name, tmp_path / "model", tied=False, **CASES[name])
    whole = whole_model(tmp_path / "model", kernels("native"), tmp_path, quantization=quantization, width=2)
    assert torch.equal(on_ranks(tmp_path / "model", tmp_path, quantization, 2), hidden(whole))


@pytest.mark.parametrize("name", CASES)
def test_two_stages_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path, tied=False, **CASES[name])
    opened = open_model(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "kernels": kernels("native")}
    layout = Layout.of(1, 2, [1] * opened.config.num_layers, 0)
    first, last = (
        StateRunner(
            load_model(opened, device=CPU, part=layout.part(stage, opened.config), **options),
            num_blocks=10,
            block_size=4,
        )
        for stage in (0, 1)
    )
    for rows in ([chain_rows(PROMPT[:6], 0, [1, 2, 3, 4], logits=False)], [TREE]):
        found = last.read(rows, first.read(rows))
    assert torch.equal(found, hidden(load_model(opened, device=CPU, **options)))


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", CASES)
def test_streamed_layers_have_the_bits_of_layers_in_memory(
    name: str, quantization: Quantization, tmp_path: Path
) -> None:
    save_random(name, tmp_path / "model", tied=False, **CASES[name])
    opened = open_model(tmp_path / "model")
    options: dict[str, Any] = {"dtype": torch.float32, "kernels": kernels("native")}
    options["quantization"] = quantization
    want = hidden(load_model(opened, device=CPU, cache=tmp_path, **options))
    prepared = prepare(opened, cache=tmp_path, **options)
    layers = [prepared.records[name].length for name in layer_records(prepared)]
    placement = Placement(1 << 30, {}, layers, 2, tuple(range(len(layers))))
    streamed = load_streamed(opened, prepared, placement, DISK, **options)
    assert torch.equal(hidden(streamed), want)
    assert streamed.stream is not None
    streamed.stream.close()
