"""Finds wrong results of a native library by comparison with PyTorch and NumPy; takes some seconds.

It runs what every model and every request runs. Tests compare all other functions with their oracles.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.backend import AlibiSpec, AttentionSpec, Paths, Rotation
from specinfer.kernels.choice import TORCH, Kernels, native_kernels
from specinfer.kernels.file_blocks import BlockForm, block_rows, lay_out_blocks
from specinfer.kernels.layout import (
    GROUP,
    BlocksWeight,
    Int4Weight,
    Int8Weight,
    lay_out_int8,
    pack_levels,
    padded,
)
from specinfer.kernels.library import Library
from specinfer.kernels.ops import NormParts
from specinfer.kernels.product import FLOATS, Product, ProductOptions
from specinfer.kernels.quantized import NativeProducts, Products
from specinfer.kernels.structures import ACTIVATIONS, BLOCK, KINDS, Kind, num_blocks
from specinfer.verify.scan import SAMPLE_REQUEST, LogitBlock

_TOLERANCE: Final = 1e-2  # tolerance relative to the largest result, for bfloat16
_LOOSE_ROWS: Final = 8  # rows for which a loose product uses another method
_ROWS: Final = (1, 2, 5, 9, 16, 17, 33, 64, 80)
_SHAPES: Final = ((33, 96), (80, 800))  # channels, inner: as many, or the next whole spans of blocks
_BLOCKS: Final = {
    "blocks4": BlockForm(4, 8, True, True),
    "blocks6": BlockForm(6, 8, True, True),
    "blocks8": BlockForm(8, 1, True, True),
}


def kernel_fault(library: Library) -> str | None:
    """The first fault of a library; None if its results are right."""
    return next(chain(faults(library), other_faults(library)), None)


def faults(library: Library) -> Iterator[str]:
    """Faults in the products of a library."""
    chance = torch.Generator().manual_seed(0)
    for channels, least in _SHAPES:
        for kind in KINDS:
            unit = _BLOCKS[kind].span * GROUP if kind in _BLOCKS else 1
            inner = -(-least // unit) * unit
            made = _matrix(kind, channels, inner, chance)
            x = 3 * torch.randn(max(_ROWS), inner, generator=chance)
            x = x.bfloat16() if kind == "bfloat16" else x
            yield from (
                f"{kind} {channels} x {inner}: {fault}" for fault in _faults_of(library, kind, made, x)
            )


def _matrix(kind: Kind, channels: int, inner: int, chance: torch.Generator) -> Callable[[Products], Product]:
    """A random matrix of one kind, as a function that gives its product by some kernels."""
    bias, size = torch.randn(channels, generator=chance), padded(inner)
    if kind in ("float32", "bfloat16"):
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        floats = torch.randn(channels, inner, generator=chance).to(dtype)
        return lambda by: by.floats(floats, bias.to(dtype))
    weight: Int8Weight | Int4Weight | BlocksWeight
    if kind == "int8":
        scales = torch.empty(channels).uniform_(0.01, 0.1, generator=chance)
        weight = lay_out_int8(_integers(-127, 128, channels, size, chance=chance).to(torch.int8), scales)
    elif kind == "int4":
        blocks = num_blocks(channels)
        groups = (blocks, size // GROUP, BLOCK)
        weight = Int4Weight(
            pack_levels(_integers(0, 16, blocks * BLOCK, size, chance=chance).to(torch.uint8)),
            torch.empty(groups).uniform_(0.01, 0.1, generator=chance).half(),
            _integers(0, 256, *groups, chance=chance).to(torch.uint8),
        )
    else:
        weight = _blocks(_BLOCKS[kind], channels, size)
    return lambda by: by.laid_out(weight, bias, inner, channels)


def _faults_of(library: Library, kind: Kind, made: Callable[[Products], Product], x: Tensor) -> Iterator[str]:
    """Faults in the product of the first rows of x, and of all rows."""
    product, plain = made(NativeProducts(library)), made(Products())
    past_caches = made(NativeProducts(library, ProductOptions(nontemporal=True)))
    whole, want = product(x), plain(x)
    for rows in _ROWS:
        if not torch.equal(product(x[:rows]), whole[:rows]):
            yield f"{rows} rows differ from the same rows among {len(x)}"
        elif not torch.equal(past_caches(x[:rows]), whole[:rows]):
            yield f"{rows} rows differ where weights are read past the caches"
    if kind in ("int8", *_BLOCKS) or (kind == "int4" and library.int4_is_exact()):
        if not torch.equal(product(x.bfloat16()), plain(x.bfloat16())):
            yield "results of bfloat16 rows differ"
        if not torch.equal(whole, want):
            yield f"{int((whole != want).sum())} of {want.numel()} results differ"
        return
    if not near(whole, want):
        yield f"results are off by {float((whole - want).abs().max()):.3g}"
    if kind == "int4":  # float32 rows become bfloat16, and few loose rows become integers
        if not torch.equal(product(x.bfloat16()), whole.bfloat16()):
            yield "results of bfloat16 rows differ"
        loose = made(NativeProducts(library, ProductOptions(loose=True)))
        if not torch.equal(loose(x[:_LOOSE_ROWS]), want[:_LOOSE_ROWS]):
            yield f"{_LOOSE_ROWS} loose rows differ"


def _blocks(form: BlockForm, channels: int, inner: int) -> BlocksWeight:
    """A random matrix of blocks of that form."""
    sizes, chance = (channels, inner // GROUP), torch.Generator().manual_seed(1)
    low, high = {4: (0, 16), 6: (-32, 32), 8: (-127, 128)}[form.bits]
    scales, mins = (torch.empty(sizes).uniform_(0.001, 0.01, generator=chance).half() for _ in range(2))
    firsts = torch.arange(sizes[1]) // form.span * form.span  # groups of a span share a scale
    steps = _integers(0 if form.bits == 4 else -63, 64, *sizes, 2, chance=chance).to(torch.int8)
    rows = block_rows(
        _integers(low, high, *sizes, GROUP, chance=chance).to(torch.int8),
        scales[:, firsts],
        steps[..., :1].expand_as(steps).contiguous() if form.bits == 4 else steps,
        mins[:, firsts],
        _integers(0, 64, *sizes, chance=chance).to(torch.uint8),
    )
    return lay_out_blocks(rows, form)


def _integers(low: int, high: int, *shape: int, chance: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=chance)


def near(found: Tensor, want: Tensor) -> bool:
    """True if results differ no more than rounding to bfloat16 allows."""
    size = float(want.float().abs().max())
    return torch.allclose(found.float(), want.float(), rtol=_TOLERANCE, atol=_TOLERANCE * size)


def other_faults(library: Library) -> Iterator[str]:
    """Faults in operations between products, in attention and in scans of logits."""
    native, chance = native_kernels(library), torch.Generator().manual_seed(1)
    for dtype, name in FLOATS.items():
        ours, plain = (_small_ops(kernels, dtype) for kernels in (native, TORCH))
        for what, found in ours.items():
            if not near(found, plain[what]):
                yield f"{what} of {name} is off by {float((found - plain[what]).abs().max()):.3g}"
    logits = torch.randn(1000, generator=chance).numpy()
    scan, highest = native.scan, float(logits.max())
    if (best := scan.most_likely(logits, 1).tolist()) != [int(logits.argmax())]:
        yield f"the likeliest token is {logits.argmax()}, not {best}"
    mass = scan.mass(logits, highest, 1.0)
    if not np.isclose(mass, TORCH.scan.mass(logits, highest, 1.0), rtol=1e-4):
        yield f"the mass of a row is not {mass:.6g}"
    yield from _faults_of_scans(native, logits)


def _small_ops(kernels: Kernels, dtype: torch.dtype) -> dict[str, Tensor]:
    """Results of everything but products on fixed random inputs."""
    rows, heads, kv_heads, head = 20, 6, 2, 64
    chance = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).to(dtype)

    x, weight, ops = random(rows, 2 * head), random(2 * head), kernels.ops
    keys, values = random(rows, kv_heads, head), random(rows, kv_heads, head)
    # The last two rows are two children of the row before them.
    paths = Paths.of(
        [0, rows, 0, rows],
        [*range(1, rows - 1), rows - 2, rows - 2],
        [*[0] * (rows - 1), 1, 2],
        [rows - 2, rows - 1],
        tables=[[1, 4, 0, 3, 2]],
        block_size=rows // 5,
    )
    angles = torch.rand(rows, head // 2, generator=chance)
    spec = AttentionSpec(
        layer=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head,
        scale=0.125,
        window=None,
        q_norm=None,
        k_norm=None,
        norm_eps=1e-5,
    )
    attend = kernels.attention.over([keys], [values]).bind(paths)
    of_int8 = [torch.zeros(rows, kv_heads, head, dtype=torch.int8) for _ in "kv"]
    scales = [torch.zeros(rows, kv_heads, dtype=torch.bfloat16) for _ in "kv"]
    attend_int8 = kernels.attention.over(of_int8[:1], of_int8[1:], [(scales[0], scales[1])]).bind(paths)
    qkv = random(rows, (heads + 2 * kv_heads) * head)
    turns = Rotation(angles.cos(), angles.sin())
    slopes = AlibiSpec(torch.arange(1, heads + 1) / 8, rounded=False)
    otherwise = replace(spec, softcap=2.0, alibi=slopes, sinks_N=random(heads))
    norms = {
        "RMSNorm": NormParts(weight, 1e-5),
        "LayerNorm": NormParts(weight, 1e-5, centred=True, bias_D=random(2 * head)),
    }
    return {
        **{name: ops.add_norm(x.clone(), None, norm) for name, norm in norms.items()},
        **{f"a gate of {name}": ops.gate(x, name) for name in ACTIVATIONS},
        **{name: ops.activate(x, name) for name in ACTIVATIONS},
        "an embedding": ops.embed(torch.arange(rows), x, 2.0),
        "attention": attend(spec, qkv, turns),
        "attention with a cap, biases and sinks": attend(otherwise, qkv, turns),
        "attention over int8": attend_int8(spec, qkv, None),
    }


def _faults_of_scans(native: Kernels, logits: NDArray[np.float32]) -> Iterator[str]:
    """Faults in scans of many rows whose stride exceeds their length."""
    size, rows, n = len(logits), np.array([2, 0, 1], dtype=np.int64), 3
    temperatures = np.array([1.0, 0.5, 2.0])
    # Greedy; and sampling among the two likeliest, with filters, and from all tokens.
    ways = ((0.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (0.7, 0, 0.9, 0.05), (1.0, 0, 1.0, 0.0))
    for dtype, name in FLOATS.items():
        wide = torch.full((3, size + 7), 1e3).to(dtype)
        wide[:, :size] = torch.from_numpy(np.stack([logits, logits[::-1], np.roll(logits, 11)]))
        lying = wide.numpy() if dtype is torch.float32 else wide.view(torch.uint16).numpy()
        block = LogitBlock(lying[:, :size])
        found, want = (scan.likeliest(block, rows, n, temperatures) for scan in (native.scan, TORCH.scan))
        if (found.ids != want.ids).any() or (found.found != want.found).any():
            yield f"the likeliest tokens of rows of {name} differ"
        elif (found.values != want.values).any() or not np.allclose(found.masses, want.masses, rtol=1e-4):
            yield f"the logits of the likeliest tokens of rows of {name}, or the masses beside them, differ"
        for way in ways:
            requests = np.array([(*way, 3, 4)] * 3, dtype=SAMPLE_REQUEST)
            ours, theirs = (s.choices(block, rows, requests, None) for s in (native.scan, TORCH.scan))
            if (ours != theirs).any():
                yield f"the choices in rows of {name} differ"
