"""Compares the time of a forward pass with the time to read its bytes, for 1 to 128 nodes.

    python -m benchmarks.machines.kernels --model TARGET --quantization none,int8,int4

The floor is the bytes that must be read, divided by the memory bandwidth. The bandwidth is measured in the
same run with the same threads, from large pages if the system has them, as for weights. There are three
tables:

- every matrix product of the model in every weight format, with enough copies that none stays in a cache
- whole forward passes of a tree after some text through the runner, for every quantization
- their time by stage
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.study import Study, natural, parser, row, run
from specinfer.check.doctor import pass_bytes, tree_pass
from specinfer.config import EngineConfig, KernelChoice
from specinfer.engine.hardware import use_threads
from specinfer.engine.models import load_models
from specinfer.hub import resolve
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.disk import STREAMED, Bandwidth
from specinfer.kernels.file_blocks import SPAN, BlockForm, blocks_bytes, empty_blocks
from specinfer.kernels.layout import (
    Int4Weight,
    Int8Weight,
    int4_bytes,
    int8_bytes,
    quantize_int4,
    quantize_int8,
)
from specinfer.kernels.library import load_library
from specinfer.kernels.machine import thread_count
from specinfer.kernels.product import Product
from specinfer.kernels.structures import STAGES
from specinfer.models.config import Family, ModelConfig
from specinfer.models.open_model import open_model
from specinfer.progress import NoProgress

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
REPEATS = 5
PART = 1024  # matrix rows quantized at a time: whole blocks of channels
FORMS = {  # GGUF blocks in their own precision
    "Q4_K": BlockForm(4, span=SPAN, steps=True, mins=True),
    "Q6_K": BlockForm(6, span=SPAN, steps=True, mins=False),
    "Q8_0": BlockForm(8, span=1, steps=False, mins=False),
    "Q4_0": BlockForm(4, span=1, steps=False, mins=False),
}
SHOWN_SHARE = 0.01  # share of a forward's time; shorter operations are added up


@contextmanager
def profiled(kernels: Kernels) -> Iterator[dict[str, int]]:
    """Nanoseconds per stage of native calls inside the block, filled in at its end.

    Empty for PyTorch's kernels. Reading the clock takes about 50 ns per stage.
    """
    found: dict[str, int] = {}
    if kernels.library is None:
        yield found
        return
    nanoseconds = np.zeros(len(STAGES), dtype=np.int64)
    kernels.library.profile(1, nanoseconds.ctypes.data)
    try:
        yield found
    finally:
        kernels.library.profile(0, nanoseconds.ctypes.data)
        found.update(zip(STAGES, nanoseconds.tolist(), strict=True))


@dataclass(frozen=True)
class Kept:
    """A matrix in one format: makes copies of its product, with the bytes that one reads."""

    name: str
    copy: Callable[[], Product]
    size: int


@dataclass(frozen=True)
class Row:
    """Milliseconds by number of nodes; with a floor, also its bytes and the multiple of it."""

    name: str
    milliseconds: Mapping[int, float]
    floor_bytes: float | None = None
    times_floor: Mapping[int, float] | None = None


def main() -> None:
    args = arguments()
    files = resolve(args.model)
    config = open_model(files.path).config
    if config.family is Family.OPT:
        sys.exit(f"error: {files.name} is an OPT model; allowed: models with a gated MLP (Llama, Qwen, ...)")
    kernels, lacking = choose_kernels(args.kernels, torch.device("cpu"), NoProgress())
    torch.set_num_threads(use_threads(args.threads, kernels))
    bandwidth = Bandwidth(kernels.library or load_library())
    products = list(product_rows(config, kernels, args.nodes, bandwidth)) if args.products else []
    forwards: list[Row] = []
    shares: dict[str, list[Row]] = {}
    for quantization in args.quantization.split(","):
        whole, shares[quantization] = forward_rows(args.model, quantization, args, bandwidth)
        gc.collect()  # one model at a time
        forwards.append(whole)
    study = Study("kernels", args.out, {"model": files.path.name})
    lines = page(files.path.stem, args, kernels, lacking, products, forwards, shares, bandwidth)
    print(study.write(lines, args.threads))


def arguments() -> argparse.Namespace:
    options = parser(__doc__, model="smollm2-135m", quantization="none", threads=thread_count())
    options.add_argument("--kernels", default="auto", choices=get_args(KernelChoice), help="default auto")
    options.add_argument("--nodes", type=_counts, default=NODES, help="default 1,2,4,8,16,32,64,128")
    options.add_argument("--context", type=natural, default=200, help="tokens of text before the tree")
    options.add_argument(
        "--products", action=argparse.BooleanOptionalAction, default=True, help="or only passes"
    )
    return options.parse_args()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(natural, text.split(",")))


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes of a decoder's products, stacked as in the decoder: [out, in]."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    return {
        "qkv": ((config.num_heads + 2 * config.num_kv_heads) * head, hidden),
        "o": (hidden, config.num_heads * head),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }


def product_rows(
    config: ModelConfig, kernels: Kernels, nodes: Sequence[int], bandwidth: Bandwidth
) -> Iterator[Row]:
    """Yield every matrix in every format, multiplied by 1 to 128 rows."""
    for matrix, (outputs, inputs) in matrices(config).items():
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
        for kept in ways_to_keep(weight, kernels, output_layer=matrix == "head"):
            copies = [kept.copy() for _ in range(max(2, round(STREAMED / kept.size)))]
            times: dict[int, float] = {}
            floors: dict[int, float] = {}
            for count in nodes:
                x = torch.empty(count, inputs, dtype=torch.bfloat16).uniform_(-1, 1)
                together, floors[count] = _products(copies, x, kept.size * len(copies), bandwidth)
                times[count] = together / len(copies)
            del copies
            yield Row(f"{matrix} {outputs} x {inputs}, {kept.name}", times, kept.size, floors)


def ways_to_keep(weight: Tensor, kernels: Kernels, *, output_layer: bool) -> Iterator[Kept]:
    """Yield a bf16 matrix in every format a model can have it in; an output layer is never int4."""
    yield Kept("bf16 plain", lambda: partial(F.linear, weight=weight.clone()), weight.nbytes)
    yield Kept("bf16", lambda: kernels.products.floats(weight, None), weight.nbytes)
    parts, inner = torch.split(weight, PART), weight.shape[1]
    int8 = Int8Weight(*_stacked(quantize_int8(part.float()) for part in parts))

    def int8_copy() -> Product:
        return kernels.products.laid_out(
            Int8Weight(*(tensor.clone() for tensor in int8)), None, inner, len(weight)
        )

    yield Kept("int8", int8_copy, int8_bytes(*weight.shape))
    for kind, form in FORMS.items():
        blocks = partial(random_blocks, len(weight), inner, form, kernels)
        yield Kept(kind, blocks, blocks_bytes(*weight.shape, form))
    if output_layer:
        return
    int4 = Int4Weight(*_stacked(quantize_int4(part.float()) for part in parts))

    def int4_copy() -> Product:
        return kernels.products.laid_out(
            Int4Weight(*(tensor.clone() for tensor in int4)), None, inner, len(weight)
        )

    yield Kept("int4", int4_copy, int4_bytes(*weight.shape))


def random_blocks(channels: int, inner: int, form: BlockForm, kernels: Kernels) -> Product:
    """Return a product with random levels, steps and scales in a form of a file's blocks."""
    weight = empty_blocks(channels, inner, form, kernels.library)
    for part in (weight.levels, weight.steps, weight.min_steps):
        part.random_(1, 256)
    for part in (weight.scales, weight.mins):
        part.uniform_(-1e-4, 1e-4)
    return kernels.products.laid_out(weight, None, inner, channels)


def _stacked(parts: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Stack weights that were quantized in parts."""
    return map(torch.cat, zip(*parts, strict=True))


def _products(copies: Sequence[Product], x: Tensor, size: int, bandwidth: Bandwidth) -> tuple[float, float]:
    """Return milliseconds of one product, in a sequence of them, and the multiple of the floor."""

    def all_copies() -> None:
        for product in copies:
            product(x)

    with torch.inference_mode():
        all_copies()
        return bandwidth.compare(all_copies, size, REPEATS)


def forward_rows(
    model: str, quantization: str, args: argparse.Namespace, bandwidth: Bandwidth
) -> tuple[Row, list[Row]]:
    """Measure whole forward passes of one quantization, and its operations."""
    options = {
        "dtype": "bfloat16",
        "device": "cpu",
        "kernels": args.kernels,
        "quantization": quantization,
        "threads": args.threads,
    }
    engine_config = EngineConfig.from_options(model, options)
    target = load_models(engine_config).target
    size = pass_bytes(resolve(model).path, target, engine_config.kind, args.context)
    times: dict[int, float] = {}
    floors: dict[int, float] = {}
    operations: dict[int, dict[str, float]] = {}
    for count in args.nodes:
        forward = tree_pass(target, args.context, count)
        forward()
        times[count], floors[count] = bandwidth.compare(forward, size, 2 * REPEATS)
        operations[count] = operation_milliseconds(forward, target.kernels)
    return Row(f"quantization {quantization}", times, size, floors), share_rows(operations, times)


def operation_milliseconds(forward: Callable[[], object], kernels: Kernels) -> dict[str, float]:
    """Return milliseconds of one forward by stage of the native kernels, and outside of them."""
    began = time.perf_counter()
    with profiled(kernels) as nanoseconds:
        for _ in range(REPEATS):
            forward()
        taken = 1e3 * (time.perf_counter() - began) / REPEATS
    stages = {stage: spent / 1e6 / REPEATS for stage, spent in nanoseconds.items()}
    return {**stages, "outside of native calls": taken - sum(stages.values())}


def share_rows(operations: Mapping[int, Mapping[str, float]], times: Mapping[int, float]) -> list[Row]:
    """Return a row per operation, longest first; operations short at every number of nodes share a row."""
    names = sorted({name for found in operations.values() for name in found})
    by_name = {name: {n: operations[n].get(name, 0.0) for n in operations} for name in names}
    large = [name for name in names if any(by_name[name][n] >= SHOWN_SHARE * times[n] for n in times)]
    large.sort(key=lambda name: -max(by_name[name].values()))
    rows = [Row(name, by_name[name]) for name in large]
    small = [name for name in names if name not in large]
    others = {n: sum(by_name[name][n] for name in small) for n in times}
    return [*rows, Row(", ".join(small), others)] if small else rows


def page(
    model: str,
    args: argparse.Namespace,
    kernels: Kernels,
    lacking: str | None,
    products: Sequence[Row],
    forwards: Sequence[Row],
    shares: Mapping[str, Sequence[Row]],
    bandwidth: Bandwidth,
) -> list[str]:
    streams = sorted(rate / 1e9 for rate in bandwidth.found)
    usual = statistics.median(streams)
    lines = [
        f"# A forward pass against the floor of its bytes: {model}",
        "",
        f"Memory streams at {usual:.1f} GB/s with {args.threads} threads (the median of measurements through "
        f"the run, {streams[0]:.1f} to {streams[-1]:.1f}). The floor is the weights' bytes over that, for "
        "whole forwards with the K and V of the text. Cells: milliseconds, and in brackets times the floor "
        "at the bandwidth right before and after.",
        "",
        kernels_line(kernels, lacking),
        "",
        *([] if not products else product_lines(products, args.nodes, usual)),
        "## Whole forwards",
        "",
        f"A binary tree of nodes behind {args.context} tokens of text, through ModelRunner; medians of "
        f"{2 * REPEATS}.",
        "",
        *_table(forwards, args.nodes, usual),
    ]
    for quantization, rows in shares.items():
        lines += [
            "",
            f"## Operations, quantization {quantization}",
            "",
            "Milliseconds of one forward by the kernels' own profile.",
            "",
            *_table(rows, args.nodes, usual),
        ]
    return lines


def kernels_line(kernels: Kernels, lacking: str | None) -> str:
    """Return a line that names the kernels."""
    if kernels.library is None:
        return f"Native kernels are not used: {lacking or 'PyTorch was asked for'}."
    return f"Native kernels for {kernels.library.level.words}."


def product_lines(products: Sequence[Row], nodes: Sequence[int], bandwidth: float) -> list[str]:
    """Return the table of products, in Markdown."""
    return [
        "## Products",
        "",
        f"Medians of {REPEATS} passes over copies of the matrix that are together {STREAMED >> 20} MB.",
        "",
        *_table(products, nodes, bandwidth),
        "",
    ]


def _table(rows: Sequence[Row], nodes: Sequence[int], bandwidth: float) -> list[str]:
    """Return a Markdown table; `bandwidth` in GB/s belongs to the floor column."""
    lines = [
        f"| | floor ms | {' | '.join(f'{n} node' + 's' * (n > 1) for n in nodes)} |",
        f"|---|---|{'---|' * len(nodes)}",
    ]
    for found in rows:
        floor = "" if found.floor_bytes is None else f"{found.floor_bytes / bandwidth / 1e6:.2f}"
        cells = [
            f"{found.milliseconds[n]:.2f}"
            + ("" if found.times_floor is None else f" ({found.times_floor[n]:.2f})")
            for n in nodes
        ]
        lines.append(row(found.name, floor, *cells))
    return lines


if __name__ == "__main__":
    run(main)
