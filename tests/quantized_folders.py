"""Tiny models in other programs' quantized formats, packed element by element, with their float values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import quantized_layouts as layouts
from tests.quantized_layouts import FP4, NF4, Pieces, compressed_config, group_index
from tests.tiny_models import write_tiny_llama, write_tiny_mixture


@dataclass(frozen=True)
class Format:
    """A quantization_config, and a function from a matrix [out, in] to its pieces and their float values."""

    said: dict[str, Any]
    make: Callable[[Tensor, torch.Generator], tuple[Pieces, Tensor]]
    int4_is_exact: bool = False


def grids(
    shape: tuple[int, int], bits: int, groups: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random levels [out, in], scales and zeros [out, groups]; zeros are in the range of the
    levels.
    """
    levels = torch.randint(0, 1 << bits, shape, generator=generator)
    # Larger steps would make the model's logits overflow.
    scales = (0.2 + torch.rand(shape[0], groups, generator=generator)).mul(0.6 / (1 << bits)).to(dtype)
    return levels, scales, torch.randint(0, 1 << bits, (shape[0], groups), generator=generator)


def plain(levels: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """Dequantize element by element."""
    return scales.float()[:, group_of] * (levels - zeros[:, group_of]).float()


def groups_of(inner: int, groups: int, acts: bool, generator: torch.Generator) -> Tensor:
    """Return the group of each element of a row; with `acts` elements of a group are anywhere."""
    found = group_index(inner, groups)
    return found[torch.randperm(inner, generator=generator)] if acts else found


def gptq(
    bits: int = 4,
    size: int = 32,
    form: str = "gptq",
    sym: bool = False,
    acts: bool = False,
    index: bool = True,
) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        out, inner = weight.shape
        groups = 1 if size == -1 else inner // size
        levels, scales, zeros = grids((out, inner), bits, groups, generator, torch.float16)
        if sym:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        group_of = groups_of(inner, groups, acts, generator)
        written = group_of if index else None
        pieces = layouts.gptq_pieces(levels, scales, zeros, bits=bits, form=form, group_of=written)
        return pieces, plain(levels, scales, zeros, group_of)

    said = layouts.gptq_config(bits, size, form=form, sym=sym, desc_act=acts)
    return Format(said, make, bits <= 4 and not acts and size % 32 in (0, 31))


def awq(size: int = 32) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        out, inner = weight.shape
        levels, scales, zeros = grids((out, inner), 4, inner // size, generator, torch.float16)
        floats = plain(levels, scales, zeros, group_index(inner, inner // size))
        return layouts.awq_pieces(levels, scales, zeros), floats

    return Format(layouts.awq_config(size), make, size % 32 == 0)


def pack_quantized(
    bits: int = 4,
    size: int | None = 32,
    symmetric: bool = True,
    acts: bool = False,
    plain_zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        out, inner = weight.shape
        groups = 1 if size is None else inner // size
        levels, scales, zeros = grids((out, inner), bits, groups, generator, dtype)
        stored = None if symmetric else zeros
        pieces = layouts.pack_quantized_pieces(levels, scales, stored, bits=bits, plain_zeros=plain_zeros)
        if symmetric:
            zeros = torch.full_like(zeros, 1 << (bits - 1))
        group_of = groups_of(inner, groups, acts, generator)
        if acts:
            pieces["weight_g_idx"] = group_of.int()
        return pieces, plain(levels, scales, zeros, group_of)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size}
    return Format(compressed_config("pack-quantized", **weights), make, bits == 4 and not acts)


def int_quantized(per_tensor: bool = False, symmetric: bool = True) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        values = torch.randint(-127, 128, weight.shape, generator=generator)
        count = 1 if per_tensor else len(weight)
        scales = (0.002 + 0.002 * torch.rand(count, 1, generator=generator)).bfloat16()
        pieces = {"weight": values.to(torch.int8), "weight_scale": scales[0] if per_tensor else scales}
        zeros = torch.zeros(count, 1)
        if not symmetric:
            zeros = torch.randint(-9, 9, (count, 1), generator=generator)
            pieces["weight_zero_point"] = zeros.to(torch.int8)
        return pieces, (values - zeros) * scales.float()

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Format(compressed_config("int-quantized", **weights), make)


def float8(
    weight: Tensor, block: tuple[int, int], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, block scales in that dtype, and their float values."""
    out, inner = weight.shape
    values = (weight * 100).to(torch.float8_e4m3fn)
    sizes = -(-out // block[0]), -(-inner // block[1])
    scales = (0.005 + 0.01 * torch.rand(sizes, generator=generator)).to(dtype)
    rows, columns = torch.arange(out) // block[0], torch.arange(inner) // block[1]
    return values, scales, values.float() * scales.float()[rows][:, columns]


def fp8(
    block: tuple[int, int] | None, *, key: str = "weight_scale_inv", scales_in: torch.dtype = torch.float32
) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        values, scales, floats = float8(weight, block or tuple(weight.shape), generator, scales_in)
        pieces = {"weight": values, key: scales if block else scales[0, 0], "input_scale": torch.ones(1)}
        return pieces, floats

    return Format({"quant_method": "fp8", "weight_block_size": block and list(block)}, make)


def float_quantized(strategy: str) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        out, inner = weight.shape
        block = {"tensor": (out, inner), "channel": (1, inner), "block": (24, 20)}[strategy]
        values, scales, floats = float8(weight, block, generator)
        pieces = {"weight": values, "weight_scale": scales[0] if strategy == "tensor" else scales}
        return pieces | {"input_scale": torch.ones(1)}, floats

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    structure = {"block_structure": [24, 20]} if strategy == "block" else {}
    return Format(compressed_config("float-quantized", **weights, **structure), make)


def four_bits(
    kind: str = "nf4", nested: bool = False, size: int = 64, storage: torch.dtype = torch.uint8
) -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        code = torch.tensor(NF4 if kind == "nf4" else FP4)
        count = weight.numel()
        numbers = torch.randint(0, 16, (count + count % 2,), generator=generator)
        blocks = -(-count // size)
        state: dict[str, Any] | None = None
        if nested:
            each = 4
            book = torch.linspace(-1, 1, 256)
            short = torch.randint(0, 256, (blocks,), generator=generator)
            of_scales = 0.1 + torch.rand(-(-blocks // each), generator=generator)
            scales = book[short] * of_scales[torch.arange(blocks) // each] + 0.4
            state = {"nested_blocksize": each, "nested_dtype": "float32", "nested_offset": 0.4}
            stored = {"weight.absmax": short.to(torch.uint8), "weight.nested_absmax": of_scales}
            stored["weight.nested_quant_map"] = book
        else:
            scales = 0.2 + torch.rand(blocks, generator=generator)
            stored = {"weight.absmax": scales}
        pieces = layouts.four_bit_pieces(
            numbers, weight.shape, stored, kind=kind, size=size, storage=storage, nested=state
        )
        floats = code[numbers[:count]] * scales[torch.arange(count) // size]
        return pieces, floats.view(weight.shape)

    return Format(layouts.four_bit_config(kind), make)


def llm_int8() -> Format:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[Pieces, Tensor]:
        values = torch.randint(-127, 128, weight.shape, generator=generator)
        largest = 0.5 + torch.rand(len(weight), generator=generator)
        pieces = {"weight": values.to(torch.int8), "SCB": largest}
        pieces["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return pieces, values * largest[:, None] * 7.874015718698502e-3

    return Format({"load_in_8bit": True}, make)


FORMATS = {
    "gptq": gptq(),
    "gptq-v2-sym": gptq(form="gptq_v2", sym=True),
    "gptq-2-bits": gptq(bits=2),
    "gptq-8-bits": gptq(bits=8),
    "gptq-rows": gptq(size=-1),
    "gptq-groups-of-16": gptq(size=16),
    "gptq-no-index": gptq(index=False),
    "gptq-desc-act": gptq(acts=True),
    "awq": awq(),
    "awq-groups-of-16": awq(size=16),
    "w4a16": pack_quantized(),
    "w4a16-asymmetric": pack_quantized(symmetric=False, dtype=torch.float16),
    "w4a16-plain-zeros": pack_quantized(symmetric=False, plain_zeros=True),
    "w4a16-channels": pack_quantized(size=None, symmetric=False),
    "w4a16-actorder": pack_quantized(acts=True),
    "w8a16": pack_quantized(bits=8, symmetric=False),
    "w8a8": int_quantized(),
    "w8a8-tensor": int_quantized(per_tensor=True),
    "w8a8-asymmetric": int_quantized(symmetric=False),
    "float-tensor": float_quantized("tensor"),
    "float-channel": float_quantized("channel"),
    "float-block": float_quantized("block"),
    "fp8-block": fp8((24, 20)),
    "fp8-block-larger": fp8((128, 128)),
    "fp8-powers": fp8((24, 20), scales_in=torch.float8_e8m0fnu),
    "fp8-tensor": fp8(None, key="weight_scale"),
    "nf4": four_bits(),
    "nf4-nested": four_bits(nested=True),
    "fp4": four_bits("fp4", size=32),
    "nf4-over-rows": four_bits(size=128, storage=torch.bfloat16),
    "llm-int8": llm_int8(),
}


def write_quantized(
    folder: Path, form: Format, *, hidden: int = 64, inner: int = 96, experts: int = 0, vocab_size: int = 64
) -> dict[str, Tensor]:
    """Write a model with quantized layer matrices; returns all tensors, these as floats.

    With `experts` it is a mixture with that number of experts and an unquantized router.
    """
    shape: dict[str, Any] = {"hidden_size": hidden, "spread": 0.1, "tie_embeddings": False}
    shape["vocab_size"] = vocab_size
    if experts:
        write_tiny_mixture(folder, experts=experts, per_token=2, expert_size=inner, **shape)
    else:
        write_tiny_llama(folder, intermediate_size=inner, **shape)
    generator = torch.Generator().manual_seed(5)
    stored, floats = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        floats[name] = stored[name] = tensor
        if "proj." in name:
            pieces, floats[name] = form.make(tensor, generator)
            del stored[name]
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{end}": piece for end, piece in pieces.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.said}))
    return floats


def pack_mxfp4(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Replace the experts of a gpt-oss folder by random MXFP4 stacks.

    Returns, by the name of a replaced tensor, blocks uint8 [experts, rows, groups, 16] and scales uint8
    [experts, rows, groups].
    """
    path, packed = folder / "model.safetensors", dict[str, tuple[Tensor, Tensor]]()
    tensors, generator = load_file(path), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = tensors.pop(name).shape
        shape = (experts, rows, inner // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
        packed[name] = blocks, scales
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return packed
