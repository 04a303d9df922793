"""Measures passes of a mixture of experts by their nodes: relative to one node and to the bytes read.

    python -m benchmarks.machines.experts

The model has the shape of a small Qwen3-MoE, 8 of 64 experts, and random weights that are never written to a
file. So a token's experts are nearly random, too. In a trained model neighbouring tokens share more experts,
and larger trees cost less than here.

    over one    milliseconds divided by those of one node: the tokens per step at which such a tree pays
    floor       milliseconds divided by the time to read the matrices of the counted experts, of attention and
    the
                output layer, and the text's K and V, at the measured memory bandwidth
    expected    distinct experts of a layer if each node chose independently
    counted     distinct experts of this pass, averaged over layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.study import Study, natural, parser, row, run, settings_of
from specinfer.check.doctor import tree_pass
from specinfer.kernels.bandwidth import Bandwidth
from specinfer.kernels.choice import choose_kernels, streaming_kernels
from specinfer.kernels.layout import Int8Weight, Weight
from specinfer.kernels.ops import NativeOps
from specinfer.models.config import Experts, Family, ModelConfig, QkNorm
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.positions import Rope
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_reader import WeightReader
from specinfer.models.weight_sizes import expert_bytes, weight_bytes
from specinfer.progress import NoProgress
from specinfer.runtime.kv_cache import KvCache
from specinfer.speculation_config import Quantization

KINDS: tuple[Quantization, ...] = ("int8", "int4")
NODES = (1, 2, 4, 8, 16, 32, 64)
TEXT = 64  # tokens before the tree
PASSES = 15  # timed passes; the median counts
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
SPREAD = 0.02  # standard deviation of weights, approximately


def main() -> None:
    options = parser(__doc__, threads=None)
    options.add_argument("--layers", type=natural, default=16, help="(default 16: about 1e9 active weights)")
    args = options.parse_args()
    config = shape(args.layers)
    named = {"model": f"qwen3-moe-like-{args.layers}-layers", **settings_of(args)}
    study = Study("experts", args.out, named)
    for kind in KINDS:
        if kind not in study.cells:
            study.keep(kind, measure(config, kind, args.threads))
    print(study.write(page(config, study.cells), args.threads))


def shape(layers: int) -> ModelConfig:
    """Return a config with OLMoE's sizes and Qwen3's layers."""
    return ModelConfig(
        family=Family.QWEN3_MOE,
        vocab_size=50304,
        hidden_size=2048,
        embedding_size=2048,
        intermediate_size=1024,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        norm_eps=1e-6,
        rope=Rope(1e6),
        layer_windows=(None,) * layers,
        tie_embeddings=False,
        qk_norm=QkNorm.HEAD,
        attention_scale=128**-0.5,
        max_context=4096,
        experts=Experts(64, 8, 1024, normalized=True),
    )


class Shapes:
    """A model file with shapes and no numbers."""

    path = Path()  # unused

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = decoder_shapes(config)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        raise AssertionError(f"{name} has no numbers")


class RandomReader(WeightReader):
    """Fills memory with random numbers of its kind, so that no unquantized matrix exists."""

    def __init__(self, config: ModelConfig, kind: Quantization) -> None:
        file: Any = Shapes(config)
        super().__init__(file, DTYPE, NoProgress(), kind)
        self._random = torch.Generator().manual_seed(1)

    def read(self, names: Sequence[str], into: Weight, rows: Sequence[int] | None = None) -> None:
        """Fill the weight with random numbers, and vectors with ones; see WeightReader."""
        inner = self.shape(names)[-1]
        for field, tensor in zip(into._fields, into, strict=True):
            if len(self.shape(names)) == 1:
                tensor.fill_(1)
            elif field == "zeros":
                tensor.fill_(120)  # the middle of 16 levels, in sixteenths
            elif field == "scales":  # scales of rotated int8 rows, or of int4 levels
                tensor.fill_(SPREAD / 74 / 32**0.5 if isinstance(into, Int8Weight) else SPREAD / 4.6)
            elif tensor.dtype == torch.uint8:
                tensor.view(-1).random_(1, 256, generator=self._random)
            else:
                tensor.normal_(0, 1 if "embed" in names[0] else inner**-0.5, generator=self._random)


def measure(config: ModelConfig, kind: Quantization, threads: int | None) -> dict[str, Any]:
    kernels, why = choose_kernels("native", CPU)
    assert kernels.library is not None, why
    if threads is not None:
        kernels.library.set_threads(threads)
    size = weight_bytes(config, DTYPE, kernels, kind)
    with RandomReader(config, kind) as reader:
        model = Decoder(config, Weights(reader, CPU, streaming_kernels(kernels, size)))
    bandwidth = Bandwidth(kernels.library)
    file: Any = Shapes(config)
    of_experts, mixture = expert_bytes(file, DTYPE, kind), config.experts
    assert mixture is not None
    beside = size - of_experts - config.vocab_size * config.hidden_size * DTYPE.itemsize
    beside += TEXT * KvCache.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, DTYPE)
    cells: dict[str, Any] = {}
    for nodes in NODES:
        call = tree_pass(model, TEXT, nodes)
        counted = count_experts(model, call)
        read = beside + of_experts * counted / mixture.count
        call()
        milliseconds, times = bandwidth.compare(call, read, PASSES)
        cells[str(nodes)] = {
            "milliseconds": milliseconds,
            "times_floor": times,
            "megabytes": read / 1e6,
            "expected": mixture.active(nodes),
            "counted": counted,
        }
    return {"nodes": cells, "bytes": size}


def count_experts(model: Decoder, call: Callable[[], object]) -> float:
    """Return the distinct experts of a layer in a pass, averaged over layers; computes the pass op by op."""
    found = [len({*numbers_TK.flatten().tolist()}) for numbers_TK in choices_of(model, call)]
    return sum(found) / len(found)


def choices_of(model: Decoder, call: Callable[[], object]) -> list[torch.Tensor]:
    """Return the chosen experts of each layer in a pass, [T, K]; computes the pass op by op."""
    choose, native, found = NativeOps.choose_experts, model._native, list[torch.Tensor]()

    def noted(
        self: NativeOps, logits_TC: torch.Tensor, count: int, each: int, *, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers_TK, weights_TK = choose(self, logits_TC, count, each, normalized=normalized)
        found.append(numbers_TK)
        return numbers_TK, weights_TK

    model._native = None
    try:
        with patch.object(NativeOps, "choose_experts", noted):
            call()
    finally:
        model._native = native
    return found


def page(config: ModelConfig, cells: dict[str, Any]) -> list[str]:
    experts = config.experts
    assert experts is not None
    active = (
        sum(
            rows * columns
            for name, (rows, columns) in ((n, s) for n, s in decoder_shapes(config).items() if len(s) == 2)
            if ".mlp.experts." not in name
        )
        + config.num_layers * experts.per_token * 3 * experts.size * config.hidden_size
    )
    active -= config.vocab_size * config.hidden_size  # embeddings are only looked up
    lines = [
        "# Mixtures of experts: a pass by its nodes",
        "",
        f"{config.num_layers} layers of {experts.count} experts of {experts.size}, of which a token has "
        f"{experts.per_token}; hidden size {config.hidden_size}, {active / 1e9:.2f}e9 active weights. "
        "Random weights: experts are nearly random, the worst case for trees.",
        f"Medians of {PASSES} passes behind {TEXT} tokens, logits of all nodes.",
    ]
    for kind, cell in cells.items():
        first = cell["nodes"]["1"]["milliseconds"]
        lines += [
            "",
            f"## {kind}",
            "",
            "| nodes | ms | over one | over the floor | MB read | expected experts | counted |",
            "|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for nodes, found in cell["nodes"].items():
            lines.append(
                row(
                    nodes,
                    f"{found['milliseconds']:.1f}",
                    f"{found['milliseconds'] / first:.2f}",
                    f"{found['times_floor']:.2f}",
                    f"{found['megabytes']:.0f}",
                    f"{found['expected']:.1f}",
                    f"{found['counted']:.1f}",
                )
            )
    lines += [
        "",
        "Speculation gains where a step makes more tokens than its tree costs over one node. Dense models "
        "that memory binds pay little for 16 nodes; here each brings experts of its own until nearly all are "
        "read.",
    ]
    return lines


if __name__ == "__main__":
    run(main)
