"""Memory for a model's weights: layers are built from addresses, and do not read the values.

A layer requests its tensors and products by name, with ranges of rows and columns for one rank of several.
Here they are tensors in ordinary memory, filled at once. docs/contracts.md has the contract of other
implementations, whose memory may be a view of a buffer, or filled after the layer was built.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat, zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels
from specinfer.kernels.file_blocks import empty_blocks
from specinfer.kernels.layout import (
    FloatTable,
    Int4Weight,
    Weight,
    choose_rows,
    cut,
    empty_floats,
    empty_int4,
    empty_int8,
)
from specinfer.kernels.library import Library
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct, Product
from specinfer.kernels.structures import BLOCK, num_blocks
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.shared_sums import EmbeddingTable, ShardedTable, branch_sum, exact_sum
from specinfer.models.stream import WeightStream
from specinfer.models.weight_reader import READERS, WeightReader, chosen_rows
from specinfer.transport.group import Group

_Part = TypeVar("_Part")


class Shared(NamedTuple):
    """Parts of a model that belong to another model or are in other memory; None for own parts."""

    table: EmbeddingTable | None = None
    output: Product | None = None  # for logits
    memory: DraftMemory | None = None  # may contain this model's matrices


class Weights:
    """Memory for the weights of a model under construction, of its dtype and device."""

    stream: WeightStream | None = None  # reads weights that are not in memory

    def __init__(
        self,
        reader: WeightReader,
        device: torch.device,
        kernels: Kernels,
        logit_ids: Sequence[int] | None = None,
        shared: Shared | None = None,
        group: Group | None = None,
    ) -> None:
        """With `logit_ids` the output layer has only these rows, in their order.

        `group` are the ranks that add up the partial sums of products divided by columns.
        """
        self.dtype = reader.dtype
        self.device = device
        self.kernels = kernels
        self._reader = reader
        self.group = group
        self._logit_ids = logit_ids
        self._shared = shared or Shared()
        self._largest: float | None = None  # largest scale of the next int4 matrix, if a file has it

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        """The tensor of that name, with `plus` added to each element; several are stacked by rows.

        A layer must keep the returned tensor, and must not read it before it computes.
        """
        tensor = torch.empty(self._reader.shape(names), dtype=self.dtype, device=self.device)
        self._reader.read(names, FloatTable(tensor))
        return tensor.add_(plus) if plus else tensor

    def exact(self, name: str) -> Tensor:
        """The tensor of that name in float32, for any dtype of the model."""
        tensor = torch.empty(self._reader.shape([name]), device=self.device)
        self._reader.read([name], FloatTable(tensor))
        return tensor

    def table(self, name: str, rows: range | None = None) -> EmbeddingTable:
        """The embedding table of that name; `rows` are this rank's, None for all."""
        if self._shared.table is not None:
            return self._shared.table
        if rows is None and (on_disk := self._reader.table_on_disk(name)) is not None:
            return on_disk
        whole = self.tensor(name)
        if rows is None:
            return EmbeddingTable(whole)
        assert self.group is not None, "other ranks have the other rows"
        return ShardedTable(whole[rows.start : rows.stop].clone(), rows.start, len(whole), self.group)

    def rows_on_disk(self, name: str) -> EmbeddingTable:
        """The table of that name, whose rows stay in the file, whatever its format; in memory on a GPU."""
        on_disk = self._reader.rows_on_disk(name) if self.device.type == "cpu" else None
        return EmbeddingTable(self.tensor(name)) if on_disk is None else on_disk

    def linear(
        self,
        *names: str,
        bias: bool = False,
        tied: EmbeddingTable | None = None,
        rows: Sequence[range | None] = (),
        columns: range | None = None,
        parts: SumParts | None = None,
        precise: bool = False,
        memory: Weight | None = None,
    ) -> Product:
        """The product with the matrix `name`.weight, and with `name`.bias if `bias`; several are stacked.

        `tied` is the same matrix, from `table`, if the output layer is tied to the embeddings. A rank with a
        part of the product has `rows` of each matrix, or `columns` of one; None is all. With `columns` it
        takes rows of that length, and returns the sum over all ranks. `parts` define the order in which sums
        of floats are added, on one rank or several. A `precise` product has float32 rows, weights and bias
        for any dtype of the model, and no `columns`. `memory` is for the matrix, if it has a place.
        """
        output_layer = tied is not None or names[0].startswith("lm_head")
        if output_layer and self._shared.output is not None:
            return self._shared.output
        matrices = [f"{name}.weight" for name in names]
        channels, inner = self._reader.shape(matrices)
        if precise:
            b = torch.cat([self.exact(f"{name}.bias") for name in names]) if bias else None
            precise_weight = self._filled(matrices, self._precise(channels, inner))
            if any(one is not None for one in rows):
                all_rows, stacked = precise_weight, self._stacked(matrices, rows)
                channels = sum(map(len, stacked))
                precise_weight = self._precise(channels, inner)
                cut(all_rows, stacked, range(inner), precise_weight)
            return self._product(precise_weight, b, inner, channels)
        b = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        if columns is not None or any(one is not None for one in rows):
            return self._part(matrices, b, rows, columns, parts, output_layer)
        chosen = self._logit_ids if output_layer else None
        library = self.kernels.products.library
        if memory is not None:
            weight = self._filled(matrices, memory)
        elif self._plain(matrices):
            whole = None if tied is None else tied.whole
            whole = self.tensor(*matrices) if whole is None else whole
            weight = FloatTable(whole if chosen is None else chosen_rows(whole, chosen))
        elif chosen is None:
            weight = self._filled(matrices, self._empty(matrices, channels, inner, output_layer, library))
        else:
            all_rows = self._filled(matrices, self._empty(matrices, channels, inner, output_layer, None))
            weight = self._empty(matrices, len(chosen), inner, output_layer, library)
            choose_rows(all_rows, chosen, weight)
        return self._product(weight, b, inner, channels if chosen is None else len(chosen), parts=parts)

    def gated(
        self,
        prefixes: Sequence[str],
        columns: range | None = None,
        parts: SumParts | None = None,
        *,
        bias: bool = False,
        gated: bool = True,
    ) -> list[tuple[Product, Product]]:
        """The products of gated MLPs of one shape: one for gate_proj and up_proj, and one for down_proj.

        MLPs that are not `gated` have up_proj alone.
        Their matrices are in adjacent memory. `columns` are this rank's part of the MLPs, and `parts` define
        how sums over all of them are added, as with `linear`. With `bias` each product has one.
        """
        names = [(first_matrices(prefix, gated=gated), f"{prefix}.down_proj") for prefix in prefixes]
        memory: Iterable[tuple[Weight | None, Weight | None]] = repeat((None, None), len(names))
        if columns is None and self._reader.quantization != "gguf":  # blocks of a file differ
            shapes = [
                self._reader.shape([f"{name}.weight" for name in matrices])
                for matrices in (names[0][0], [names[0][1]])
            ]
            memory = zip(*(self._side_by_side(len(names), *shape) for shape in shapes), strict=True)
        # An expert's matrices are read in sequence, which is their order in a prepared file.
        return [
            (
                self.linear(*both, bias=bias, rows=[columns] * len(both), memory=first),
                self.linear(down, bias=bias, columns=columns, parts=parts, memory=last),
            )
            for (both, down), (first, last) in zip(names, memory, strict=True)
        ]

    def _part(
        self,
        matrices: Sequence[str],
        bias: Tensor | None,
        rows: Sequence[range | None],
        columns: range | None,
        parts: SumParts | None,
        output_layer: bool,
    ) -> Product:
        """The product with these ranges of matrices; the whole matrices are in memory temporarily."""
        channels, inner = self._reader.shape(matrices)
        stacked = self._stacked(matrices, rows)
        within = range(inner) if columns is None else columns
        whole = self._filled(matrices, self._empty(matrices, channels, inner, output_layer, None))
        largest = float(whole.scales.max()) if isinstance(whole, Int4Weight) else None
        channels = sum(map(len, stacked))
        weight = self._empty(matrices, channels, len(within), output_layer, self.kernels.products.library)
        cut(whole, stacked, within, weight)
        if bias is not None:
            bias = torch.cat([bias[one.start : one.stop] for one in stacked])
        product = self._product(weight, bias, len(within), channels, largest, parts)
        if columns is None:
            return product
        assert self.group is not None, "ranks add columns up"
        assert isinstance(product, NativeProduct), "support.py refuses others"
        if self.group.exchange is not None:
            product.join(self.group.exchange)
            return product
        if parts is None:
            return partial(exact_sum, product, self.group)
        return partial(branch_sum, product, parts, self.group)

    def _stacked(self, matrices: Sequence[str], rows: Sequence[range | None]) -> list[range]:
        """These rows of each matrix as rows of all, stacked; None is all."""
        stacked, first = list[range](), 0
        for name, part in zip_longest(matrices, rows):
            count = self._reader.shape([name])[0]
            own = range(count) if part is None else part
            stacked.append(range(first + own.start, first + own.stop))
            first += count
        return stacked

    def _plain(self, matrices: Sequence[str]) -> bool:
        """True if matrices are read in the file's layout, because neither products nor files have another."""
        lacking = self.kernels.products.library is None or not self._reader.keeps
        return lacking and self._reader.is_float(matrices)

    def _empty(
        self, matrices: Sequence[str], channels: int, inner: int, output_layer: bool, library: Library | None
    ) -> Weight:
        """Memory for a matrix of this model's kind, not yet filled; in large pages with a library."""
        quantization = self._reader.quantization
        if self._plain(matrices):
            return FloatTable(torch.empty(channels, inner, dtype=self.dtype, device=self.device))
        if self._reader.is_float(matrices):
            return empty_floats(channels, inner, self.dtype, library)
        if quantization == "gguf" and (form := self._reader.block_form(matrices)) is not None:
            return empty_blocks(channels, inner, form, library)
        # In int4, the output layer would cost a small model more accuracy than all its other matrices.
        if quantization == "int4" and not output_layer:
            return empty_int4(channels, inner, library)
        return empty_int8(channels, inner, library)

    def _precise(self, channels: int, inner: int) -> Weight:
        """Memory for a matrix of float32."""
        if self.kernels.products.library is None:
            return FloatTable(torch.empty(channels, inner, device=self.device))
        return empty_floats(channels, inner, torch.float32, self.kernels.products.library)

    def _side_by_side(self, count: int, channels: int, inner: int) -> list[Weight]:
        """Memory for `count` matrices of this model's kind, in one allocation."""
        library, blocks = self.kernels.products.library, num_blocks(channels)
        if self._reader.quantization == "none" and library is None:
            tables = torch.empty(count, channels, inner, dtype=self.dtype, device=self.device)
            return [FloatTable(table) for table in tables]
        rows = count * blocks * BLOCK
        if self._reader.quantization == "none":
            whole: Weight = empty_floats(rows, inner, self.dtype, library)
        else:
            whole = self._empty((), rows, inner, False, library)
        parts = (slice(number * blocks, (number + 1) * blocks) for number in range(count))
        return [type(whole)(*(tensor[part] for tensor in whole)) for part in parts]

    def _filled(self, matrices: Sequence[str], weight: Weight) -> Weight:
        """These matrices, stacked; `weight` is memory of their kind and shapes."""
        draft_memory = self._shared.memory
        there = None if draft_memory is None else draft_memory.weight("+".join(matrices), type(weight))
        if there is not None:
            self._reader.mark_read(matrices)
            return there
        self._reader.read(matrices, weight)
        return weight

    def _product(
        self,
        weight: Weight,
        bias: Tensor | None,
        inner: int,
        channels: int,
        largest: float | None = None,
        parts: SumParts | None = None,
    ) -> Product:
        """The product with a filled weight; `largest` is the largest scale of an int4 weight."""
        largest = self._largest if largest is None else largest
        return product_over(self.kernels, weight, bias, inner, channels, largest, parts)

    def expert_prefetch(self, first: str) -> Callable[[Sequence[int]], None] | None:
        """A function that is called with the numbers of the experts a pass needs; None: all are in memory.

        `first` is the prefix of the tensors of the layer's first expert.
        """
        return None

    def each(self, make: Callable[[int], _Part], count: int) -> Iterable[_Part]:
        """`make(0)`, `make(1)`, ...: layers with separate tensors, in the order in which they run."""
        if not self._reader.one_thread_each:
            return [make(number) for number in range(count)]
        with ThreadPoolExecutor(READERS, thread_name_prefix="layers") as pool:
            return [*pool.map(make, range(count))]


def first_matrices(prefix: str, *, gated: bool) -> list[str]:
    """The names of an MLP's matrices before its activation."""
    return [f"{prefix}.gate_proj", f"{prefix}.up_proj"] if gated else [f"{prefix}.up_proj"]


def product_over(
    kernels: Kernels,
    weight: Weight,
    bias: Tensor | None,
    inner: int,
    channels: int,
    largest: float | None = None,
    parts: SumParts | None = None,
) -> Product:
    """The product with a weight that lies ready; `largest` is of int4 weights, as Products say."""
    products = kernels.products
    if isinstance(weight, FloatTable):
        return products.floats(weight.rows, bias, parts)
    bias = None if bias is None else bias.float()
    return products.laid_out(weight, bias, inner, channels, largest, parts)


class PassingWeights(Weights):
    """Weights that are built, written to a file and released, one matrix at a time.

    Models built from them cannot compute.
    """

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        """A tensor of that shape without values."""
        shape = self._reader.shape(names)
        if len(shape) > 1:
            super().tensor(*names)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _side_by_side(self, count: int, channels: int, inner: int) -> list[Weight]:
        return super()._side_by_side(1, channels, inner) * count  # each is written before the next is built

    def _product(self, *given: object, **named: object) -> Product:
        return _computes_nothing


def _computes_nothing(x: Tensor) -> Tensor:
    raise AssertionError("a model built from PassingWeights cannot compute")
