"""Which tensor of a file, and which of its rows, is each of the decoder's: literal rows of small heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specinfer.errors import ModelFileError
from specinfer.models.config import QkNorm
from specinfer.models.families.registry import config_from_hf
from specinfer.models.positions import Rope
from specinfer.models.sources import GATE_UP, QKV, Names, Source, Sources

# Four query heads and two key-value heads of four elements.
CONFIG = config_from_hf(
    {
        **{"model_type": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 6},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
)
FUSED = {"attn.qkv": QKV, "attn.out": "self_attn.o_proj", "ffn.gate_up": GATE_UP}


def rows_of(names: Names, tensor: str) -> dict[str, range | tuple[int, ...] | None]:
    return {
        name.removeprefix("model.layers.1."): source.rows
        for name, source in names.sources(tensor, CONFIG).items()
    }


def test_names_inside_and_outside_layers() -> None:
    names = Names("blk.", {"out": "lm_head"}, FUSED)
    assert names.sources("out.weight", CONFIG) == {"lm_head.weight": Source("out.weight")}
    there = "blk.1.attn.out.bias"
    assert names.sources(there, CONFIG) == {"model.layers.1.self_attn.o_proj.bias": Source(there)}
    for odd in ("blk.x.attn.out.bias", "blk.attn.out.bias", "blk.1", "out.scale", "blk.1.attn.out.scale"):
        assert names.sources(odd, CONFIG) == {odd: Source(odd)}


def test_a_stack_by_key_heads_has_what_belongs_to_each_together() -> None:
    names = Names("blk.", {}, FUSED, by_key_head=True)
    assert rows_of(names, "blk.1.attn.qkv.weight") == {
        "self_attn.q_proj.weight": (*range(8), *range(16, 24)),
        "self_attn.k_proj.weight": (*range(8, 12), *range(24, 28)),
        "self_attn.v_proj.weight": (*range(12, 16), *range(28, 32)),
    }
    assert rows_of(names, "blk.1.ffn.gate_up.weight") == rows_of(
        Names("blk.", {}, FUSED), "blk.1.ffn.gate_up.weight"
    )


def test_rotated_elements_stand_half_a_head_apart() -> None:
    """Pairs (0, 2) and (1, 3) of a file that rotates four of eight become (0, 4) and (1, 5)."""
    wide = replace(CONFIG, head_dim=8, num_heads=1, num_kv_heads=1)
    key, norm = "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.q_norm.weight"

    def order(rotated: int, name: str) -> range | tuple[int, ...] | None:
        config = replace(wide, rope=Rope(10.0, rotated=rotated))
        return Names().sources(name, config)[name].rows

    assert order(4, key) == order(4, norm) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert order(6, key) == (0, 1, 2, 6, 3, 4, 5, 7)
    assert order(8, key) is None
    several = replace(wide, num_heads=2, qk_norm=QkNorm.WHOLE, rope=Rope(10.0, rotated=4))
    assert Names().sources(norm, several)[norm].rows == (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
    assert order(4, key.replace("k_proj", "v_proj")) is None


def test_neighbours_that_are_pairs_stand_half_a_head_apart() -> None:
    names = Names("blk.", {}, FUSED, neighbours=True)
    rows = rows_of(names, "blk.1.attn.qkv.weight")
    assert rows["self_attn.k_proj.weight"] == (16, 18, 17, 19, 20, 22, 21, 23)
    assert rows["self_attn.v_proj.weight"] == range(24, 32)
    by_head = rows_of(replace(names, by_key_head=True), "blk.1.attn.qkv.weight")
    assert by_head["self_attn.k_proj.weight"] == (8, 10, 9, 11, 24, 26, 25, 27)


@pytest.mark.parametrize("by_key_head", [False, True])
def test_rows_are_read_alike_however_they_are_cut(by_key_head: bool) -> None:
    names, there = Names("blk.", {}, FUSED, by_key_head=by_key_head), "blk.0.attn.qkv.weight"
    tensor = torch.arange(64).view(32, 2)
    sources = Sources("x", names, {there: (32, 2), "blk.0.attn.out.weight": (32, 2)}, CONFIG)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        assert name in (there, "blk.0.attn.out.weight")
        assert 0 <= start < stop <= 32
        return tensor[start:stop]

    for name, source in rows_of(names, "blk.0.attn.qkv.weight").items():
        want = tensor[list(source)]
        for start, stop in ((0, 8), (1, 2), (2, 7)):
            got = sources.read(f"model.layers.0.{name.removeprefix('model.layers.0.')}", read, start, stop)
            assert torch.equal(got, want[start:stop])
    assert torch.equal(sources.read("model.layers.0.self_attn.o_proj.weight", read, 3, 30), tensor[3:30])


def test_matrices_with_a_row_for_each_input_are_turned() -> None:
    names, there = Names("blk.", {}, FUSED, transposed=("attn.qkv",)), "blk.0.attn.qkv.weight"
    tensor = torch.arange(3 * 32).view(3, 32)
    sources = Sources("x", names, {there: (3, 32), "blk.0.attn.qkv.bias": (32,)}, CONFIG)
    name = "model.layers.0.self_attn.k_proj"
    assert (sources.shapes[f"{name}.weight"], sources.shapes[f"{name}.bias"]) == ((8, 3), (8,))
    for start, stop in ((0, 8), (3, 5)):
        got = sources.read(f"{name}.weight", lambda _, a, b: tensor[a:b], start, stop)
        assert torch.equal(got, tensor[:, 16 + start : 16 + stop].T)
    with pytest.raises(ModelFileError, match=r"shape \[31, 5\], the config asks for \[32, 5\]"):
        Sources("x", names, {there: (5, 31)}, CONFIG)


def test_a_stack_of_other_rows_than_the_config_says_is_refused() -> None:
    names, there = Names("blk.", {}, FUSED), "blk.0.attn.qkv.weight"
    assert Sources("x", names, {there: (32, 5)}, CONFIG).shapes == {
        "model.layers.0.self_attn.q_proj.weight": (16, 5),
        "model.layers.0.self_attn.k_proj.weight": (8, 5),
        "model.layers.0.self_attn.v_proj.weight": (8, 5),
    }
    for rows in (31, 33, 48):
        with pytest.raises(ModelFileError, match=rf"shape \[{rows}, 5\], the config asks for \[32, 5\]"):
            Sources("x", names, {there: (rows, 5)}, CONFIG)


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    names, both = (
        Names("blk.", {}, FUSED | {"k": "self_attn.k_proj"}),
        ["blk.0.attn.qkv.weight", "blk.0.k.weight"],
    )
    shapes = {both[0]: (32, 5), both[1]: (8, 5)}
    with pytest.raises(ModelFileError, match=r"'blk\.0\.attn\.qkv\.weight' and 'blk\.0\.k\.weight' are both"):
        Sources("x", names, shapes, CONFIG)
