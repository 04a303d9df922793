"""Memory of weights: filled after loading, and shared in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels
from specinfer.kernels.layout import FloatTable, FloatWeight, lay_out_floats
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import FLOATS, NativeProduct, Product
from specinfer.kernels.structures import BLOCK, num_blocks, padded_inner
from specinfer.models.config import ModelConfig
from specinfer.models.decoder import Decoder, DecoderLayer
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.shared_sums import EmbeddingTable
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_reader import TensorFile, WeightReader
from specinfer.models.weights import load_model
from specinfer.progress import NoProgress
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import NAMES, kernels
from tests.parity.families import save_random
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")


class LateWeights(Weights):
    """Views of one buffer, of NaN until `arrive` is called."""

    def __init__(self, reader: WeightReader, chosen: Kernels) -> None:
        super().__init__(reader, CPU, chosen)
        self._buffer = torch.full((1 << 20,), float("nan"))
        self._taken = 0
        self._fills: list[Callable[[], None]] = []

    def arrive(self) -> None:
        """Fill the buffer."""
        for fill in self._fills:
            fill()

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        view = self._view(*self._reader.shape(names))

        def fill() -> None:
            self._reader.read(names, FloatTable(view))
            view.add_(plus)

        self._fills.append(fill)
        return view

    def linear(
        self,
        *names: str,
        bias: bool = False,
        tied: EmbeddingTable | None = None,
        rows: Sequence[range | None] = (),
        columns: range | None = None,
        parts: SumParts | None = None,
        precise: bool = False,
    ) -> Product:
        assert parts is None
        assert not precise or self.dtype is torch.float32
        matrices = [f"{name}.weight" for name in names]
        whole = None if tied is None else tied.whole
        weight = self.tensor(*matrices) if whole is None else whole
        b = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        library = self.kernels.library
        if library is None:
            return self.kernels.products.floats(weight, b)
        kind, (channels, inner) = FLOATS[self.dtype], weight.shape
        there = self._view(num_blocks(channels) * BLOCK * padded_inner(kind, inner))
        count = 4 // self.dtype.itemsize
        blocks = there.view(num_blocks(channels), -1, BLOCK, count)
        self._fills.append(lambda: lay_out_floats(weight, FloatWeight(blocks)))
        return NativeProduct(library, kind, there, channels=channels, inner=inner, bias=b)

    def gated(
        self,
        prefixes: Sequence[str],
        columns: range | None = None,
        parts: SumParts | None = None,
        *,
        bias: bool = False,
    ) -> list[tuple[Product, Product]]:
        return [
            (
                self.linear(f"{one}.gate_proj", f"{one}.up_proj", bias=bias),
                self.linear(f"{one}.down_proj", bias=bias),
            )
            for one in prefixes
        ]

    def _view(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        start = self._taken
        self._taken += -(-size // 16) * 16  # lines of 64 bytes, as the library requires
        return self._buffer[start : start + size].view(shape)


class Slices:
    """Rows and columns of the tensors of another file."""

    def __init__(self, file: TensorFile, slices: Mapping[str, tuple[slice, slice]]) -> None:
        self.path = file.path
        self._file = file
        self._slices = slices

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(self._whole(name).shape) for name in self._file.shapes}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._whole(name)[start:stop]

    def _whole(self, name: str) -> Tensor:
        whole = self._file.read_rows(name, 0, self._file.shapes[name][0])
        return whole[self._slices[name]] if name in self._slices else whole


def reader(file: TensorFile) -> WeightReader:
    return WeightReader(file, torch.float32, NoProgress())


def logits_of(model: LanguageModel) -> Tensor:
    runner = ModelRunner(model, num_blocks=2, block_size=4)
    return runner.forward([Rows((3, 1, 4, 1, 5), 0, [0, 1], 0)])


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "qwen2-moe", "gemma3", "opt"])
def test_a_model_may_be_built_before_its_weights_arrive(family: str, name: str, tmp_path: Path) -> None:
    save_random(family, tmp_path, tied=family == "gemma3")
    file = open_model(tmp_path)
    want = logits_of(load_model(file, dtype=torch.float32, device=CPU, kernels=kernels(name)))
    with reader(file) as reading:
        weights = LateWeights(reading, kernels(name))
        model = Decoder(file.config, weights)
        assert logits_of(model).isnan().any()
        weights.arrive()
    assert torch.equal(logits_of(model), want)


@pytest.fixture
def whole(tmp_path: Path) -> OpenModel:
    return open_model(write_tiny_llama(tmp_path, hidden_size=32, intermediate_size=48))


def share(config: ModelConfig, number: int) -> tuple[ModelConfig, dict[str, tuple[slice, slice]]]:
    """Half of the heads and of the MLP, and which slices of the first layer they are."""
    heads, kv, inner = config.num_heads // 2, config.num_kv_heads // 2, config.intermediate_size // 2
    every, prefix = slice(None), "model.layers.0"

    def part(size: int) -> slice:
        return slice(number * size, (number + 1) * size)

    q, k, mlp = part(heads * config.head_dim), part(kv * config.head_dim), part(inner)
    slices = {"q": (q, every), "k": (k, every), "v": (k, every), "o": (every, q)}
    found = {f"{prefix}.self_attn.{name}_proj.weight": both for name, both in slices.items()}
    found |= {f"{prefix}.mlp.{name}_proj.weight": (mlp, every) for name in ("gate", "up")}
    found[f"{prefix}.mlp.down_proj.weight"] = every, mlp
    return replace(config, num_heads=heads, num_kv_heads=kv, intermediate_size=inner), found


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_a_layer_add_up_to_the_layer(name: str, whole: OpenModel) -> None:
    def products(config: ModelConfig, file: TensorFile) -> tuple[Product, Product, Product, Product]:
        with reader(file) as reading:
            weights = Weights(reading, CPU, kernels(name))
            return DecoderLayer(0, config, weights, "model.layers.0").parts().products

    config = whole.config
    shares = [share(config, number) for number in (0, 1)]
    halves = [products(part, Slices(whole, slices)) for part, slices in shares]
    qkv, o, gate_up, down = products(config, whole)
    generator = torch.Generator().manual_seed(0)
    x, mlp = (torch.randn(3, size, generator=generator) for size in (32, 48))

    def side_by_side(which: int, sizes: list[int]) -> Tensor:
        parts = [half[which](x).split(sizes, 1) for half in halves]
        return torch.cat([part for pair in zip(*parts, strict=True) for part in pair], 1)

    def added(which: int, rows: Tensor) -> Tensor:
        first, second = (
            half[which](part.contiguous()) for half, part in zip(halves, rows.chunk(2, 1), strict=True)
        )
        return first + second

    assert torch.equal(side_by_side(0, [16, 8, 8]), qkv(x))
    assert torch.equal(side_by_side(2, [24, 24]), gate_up(x))
    torch.testing.assert_close(added(1, x), o(x))
    torch.testing.assert_close(added(3, mlp), down(mlp))
