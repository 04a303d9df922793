"""A native call of layers of every kind, in any order, gives the bits of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import pytest
import torch
from torch import Tensor

from specinfer.attention.backend import AttentionSpec, Rotation
from specinfer.kernels.attention import NativeAttend, NativeAttention
from specinfer.kernels.choice import Kernels
from specinfer.kernels.decoder import NativeDecoder, NativeLayers
from specinfer.kernels.layer_parts import LayerParts
from specinfer.kernels.ops import NormParts
from specinfer.kernels.product import Product
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.states import StatePass
from specinfer.runtime.batch import Rows
from tests.kernels import kernels
from tests.unit.attention.paths import paths_of
from tests.unit.kernels.recurrent import Part, States, block, inputs

SIZE, INNER, HEADS, KV_HEADS, HEAD = 48, 80, 4, 2, 16
BLOCKS: Final = {
    "conv": block("short_conv", (SIZE, 0, 0, 0), taps=3),
    "delta": block("gated_delta", (4, 2, 16, 16), norm="before", norm_groups="heads"),
    "mamba": block("mamba2", (4, 2, 16, 16), skip=True, norm="behind", norm_groups=2, bias=True),
}
# Kinds of layers: Attention, Gated attention, Recurrence, Both, or an MLP alone (N); lower case has no MLP.
ORDERS: Final = ("RA", "AR", "NrB", "rG", "bNa", "BR")
TREE: Final = [-1, 0, 0, 1]


@pytest.fixture(scope="module")
def native() -> Kernels:
    return kernels("native")


class Model:
    """Random layers of these kinds."""

    def __init__(self, native: Kernels, order: str, recurrence: RecurrenceParts, dtype: torch.dtype) -> None:
        self.native, self.dtype = native, dtype
        self._made = torch.Generator().manual_seed(3)
        self._recurrences = -1
        self.layers = [self._layer(number, kind, recurrence) for number, kind in enumerate(order)]
        self.embedding_VD, self.norm = self._random(64, SIZE), self._norm()
        self.ops, wrapped = native.ops, NativeLayers.of(self.layers, native.ops)
        assert wrapped is not None
        self.decoder = NativeDecoder(
            *(wrapped, self.embedding_VD, 1.0),
            dtype=dtype,
            places=None,
            norm=self.norm,
            output=self._product(64, SIZE),
            rotations=(1, _rotations),
            writing=len(order),
        )
        empty, cache = torch.empty(64, 0, HEAD, dtype=dtype), torch.zeros(64, KV_HEADS, HEAD, dtype=dtype)
        both = [[(cache if kind in "AGBab" else empty).clone() for kind in order] for _ in range(2)]
        over = NativeAttention(native.ops.library).over(*both)
        self.cache = over
        self.states = States(native.ops, recurrence)

    def _random(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self._made) * 0.3).to(self.dtype)

    def _product(self, channels: int, inner: int) -> Product:
        return self.native.products.floats(self._random(channels, inner), None)

    def _norm(self) -> NormParts:
        return NormParts(1 + self._random(SIZE), 1e-5)

    def _layer(self, number: int, kind: str, recurrence: RecurrenceParts) -> LayerParts:
        heads, products = None, []
        if kind.upper() in "AGB":
            gated = kind.upper() == "G"
            heads = AttentionSpec(
                layer=number,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD,
                scale=HEAD**-0.5,
                window=None,
                q_norm=None,
                k_norm=None,
                norm_eps=1e-5,
                gated=gated,
            )
            width = (HEADS * (2 if gated else 1) + 2 * KV_HEADS) * HEAD
            products = [self._product(width, SIZE), self._product(SIZE, HEADS * HEAD)]
        if kind.isupper():
            products += [self._product(2 * INNER, SIZE), self._product(SIZE, INNER)]
        rotated: Literal["global"] = "global"
        return LayerParts(
            norms=[self._norm(), self._norm(), None, None],
            heads=heads,
            products=tuple(products),
            recurrence=self._recurrence(recurrence) if kind.upper() in "RB" else None,
            rope=rotated,
            parallel=False,
            activation="silu",
            gated=True,
            clip=None,
            scale=0.5,
        )

    def _recurrence(self, parts: RecurrenceParts) -> RecurrenceParts:
        made, _ = inputs(parts, 0, self.dtype)
        gates = None
        if parts.gates is not None:
            gates = self.native.products.floats(self._random(parts.sizes.gates, SIZE).float(), None)
        products = self._product(made.shape[1], SIZE), self._product(SIZE, parts.sizes.values)
        layer = self._recurrences = self._recurrences + 1
        return replace(parts, layer=layer, products=products, gates=gates)

    def run(self, part: Part, rows: Rows, *, steps: bool = False) -> Tensor:
        """The rows of a pass, at once or by steps; a part of the states' pass has its tokens as inputs."""
        attend, states = self.cache.bind(paths_of(rows)), self.states.begin(part)
        depths: list[int] = []
        for parent in rows.parents or ():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        root = rows.start + len(rows.token_ids) - len(depths)
        positions = [*range(rows.start, root), *(root + depth for depth in depths)]
        ids_T, positions_T = torch.tensor(rows.token_ids), torch.tensor(positions)
        if steps:
            return self._by_steps(ids_T, positions_T, attend, states)
        every, seen = range(len(self.layers) + 1), None
        made_TD, seen, _ = self.decoder(ids_T, positions_T, None, attend, every, 0, states=states)
        assert seen.isfinite().all()
        return made_TD

    def _by_steps(
        self, ids_T: Tensor, positions_T: Tensor, attend: NativeAttend, states: StatePass
    ) -> Tensor:
        (table,) = _rotations(512)
        turned = Rotation(table.cos[positions_T], table.sin[positions_T])
        ops, x_TD, y_TD = self.ops, self.embedding_VD[ids_T], None
        for layer in self.layers:
            before, before_mlp, *_ = layer.norms
            products, block = list(layer.products), layer.recurrence
            assert before is not None
            assert before_mlp is not None
            if layer.heads is not None or block is not None:
                given_TD, y_TD = ops.add_norm(x_TD, y_TD, before), None
                if layer.heads is not None:
                    made_TC = products.pop(0)(given_TD)
                    width = (HEADS + 2 * KV_HEADS) * HEAD
                    values_TC = attend(layer.heads, made_TC[:, :width].contiguous(), turned)
                    if layer.heads.gated:
                        values_TC = ops.open_values(values_TC, made_TC[:, width:])
                    y_TD = products.pop(0)(values_TC)
                if block is not None:
                    gates_TG = None if block.gates is None else block.gates(given_TD.float())
                    made_TC = block.products[0](given_TD)
                    made_TD = block.products[1](ops.recur(block, made_TC, gates_TG, states))
                    y_TD = made_TD if y_TD is None else y_TD + made_TD
                assert y_TD is not None
                y_TD *= layer.scale
            if products:
                up, down = products
                y_TD = down(ops.gate(up(ops.add_norm(x_TD, y_TD, before_mlp)), "silu")) * layer.scale
        return ops.norm_of_sum(x_TD, y_TD, self.norm)


def _rotations(positions: int) -> Sequence[Rotation]:
    angles = torch.arange(positions)[:, None] * 0.3 ** torch.arange(HEAD // 2)
    return [Rotation(angles.cos(), angles.sin())]


def test_one_call_has_the_bits_of_its_steps(native: Kernels) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for name, recurrence in BLOCKS.items():
            text = inputs(recurrence, 40, dtype)  # only the number of tokens counts
            for order in ORDERS:
                at_once, by_steps = (Model(native, order, recurrence, dtype) for _ in range(2))
                for first, tokens, parents in ((0, 11, None), (11, 1, [-1]), (12, 4, TREE), (13, 6, None)):
                    ids = [(7 * n) % 60 for n in range(first, first + tokens)]
                    part = Part(text, range(tokens), first, parents=parents)
                    rows = Rows(ids, first, range(4), 0, parents)
                    made, want = at_once.run(part, rows), by_steps.run(part, rows, steps=True)
                    assert torch.equal(made, want), (name, order, first)
                    kept = [model.states.memory for model in (at_once, by_steps)]
                    assert torch.equal(kept[0].states_LSF[0, 0], kept[1].states_LSF[0, 0]), (name, order)


def test_states_that_do_not_fit_are_refused(native: Kernels) -> None:
    model = Model(native, "RA", BLOCKS["delta"], torch.float32)
    other = Model(native, "RA", BLOCKS["mamba"], torch.float32).states
    part = Part(inputs(BLOCKS["delta"], 2, torch.float32), range(2), 0)
    attend, ids = model.cache.bind(paths_of(Rows([1, 2], 0, [0], 0))), torch.arange(2)
    for states, fault in (
        (None, "got no states; a model with recurrent layers needs those of its requests"),
        (other.begin(part), "rings must be contiguous"),
        (model.states.begin(part, part), "rows that are not each visited once: 2 rows"),
    ):
        with pytest.raises(ValueError, match=fault):
            model.decoder(ids, ids, None, attend, [], 0, states=states)
