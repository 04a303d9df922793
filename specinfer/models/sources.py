"""The map from the decoder's tensors to model files: names, rows and the order of rows.

The decoder has the names of Llama on the Hugging Face hub (`model.layers.0.self_attn.q_proj.weight`), one
tensor for each, and heads in which the two elements of a rotated pair are half a head apart.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.recurrence_config import GATES, input_rows
from specinfer.models.config import Experts, ModelConfig, QkNorm
from specinfer.models.quantized.pieces import LastFew

QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP: Final = ("mlp.gate_proj", "mlp.up_proj")
SHARED: Final = "mlp.shared_expert."
# Stacks that have the parts of one head or group after another.
GATED_QUERY: Final = ("self_attn.q_proj", "self_attn.gate_proj")
QKVZ: Final = ("mixer.in_proj_q", "mixer.in_proj_k", "mixer.in_proj_v", "mixer.in_proj_z")
FACTOR_GATE_X: Final = ("mixer.in_proj_factor", "mixer.in_proj_gate", "mixer.in_proj_x")
BETA_A: Final = tuple(f"mixer.{name}" for name in GATES)
Rows = range | tuple[int, ...]
Inside = Mapping[str, str | tuple[str, ...]]
_VECTORS: Final = ("mixer.decay", "mixer.skip", "mixer.norm.weight")
_LAYER: Final = "model.layers."  # the decoder's prefix of names inside layers, before the layer's number
_NUMBER: Final = re.compile(r"\.(\d+)\.")
_ROTATED: Final = re.compile(r"self_attn\.(?:[qk]_proj\.(?:weight|bias)|[qk]_norm\.weight)$")


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of a file, and its rows that make up the decoder's tensor, in their order; None is all.

    If `transposed`, they are columns of the file's tensor. If `log`, the file's x stands for -exp(x);
    otherwise elements are multiplied by `factor`.
    """

    name: str
    rows: Rows | None = None
    transposed: bool = False
    log: bool = False
    flat: bool = False  # a vector that the file has as a matrix
    factor: float = 1.0

    @property
    def changed(self) -> bool:
        """True if elements differ from the file's."""
        return self.log or self.factor != 1.0


@dataclass(frozen=True, slots=True)
class Names:
    """How the files of a family name the decoder's tensors, stack them and order their rows.

    Names have no `.weight` or `.bias`; names inside layers have no layer prefix, and * for an expert's
    number. Other tensors have the decoder's names.
    """

    layers: str = _LAYER  # the prefix of names inside layers, before the layer's number
    # The file's name -> the decoder's; a tuple is stacked by rows, as many each as a row has columns.
    outside: Inside = field(default_factory=dict)
    inside: Inside = field(default_factory=dict)  # a tuple is stacked by rows
    # Tensors with the matrices or biases of all experts concatenated, and the matrices of each expert in
    # them, by full names inside a layer.
    expert_stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # True if rows of an expert's matrices alternate; otherwise each matrix is contiguous.
    in_turns: bool = False
    # Stacks with transposed matrices.
    turned_stacks: Collection[str] = ()
    # Full names inside a layer of tensors without `.weight` or `.bias`, in the file or in the decoder.
    whole: Mapping[str, str] = field(default_factory=dict)
    # True if a stack of q, k and v has for each key-value head its query heads, its key and its value;
    # otherwise all queries come first.
    by_key_head: bool = False
    # The decoder's vectors of ones, which files do not have.
    ones: tuple[str, ...] = ()
    transposed: Collection[str] = ()  # transposed matrices inside layers
    # True if rotated pair i is elements 2 i and 2 i + 1 of a head; otherwise the two elements are half a
    # head apart.
    neighbours: bool = False

    def sources(self, name: str, config: ModelConfig) -> dict[str, Source]:
        """The decoder's tensors that a file's tensor of this name has."""
        stem, dot, kind = name.rpartition(".")
        number, between, own = stem.removeprefix(self.layers).partition(".")
        in_layer = stem.startswith(self.layers) and between and number.isdecimal()
        if in_layer and config.experts is not None and (of_each := self.expert_stacks.get(f"{own}.{kind}")):
            return self._experts(name, f"{_LAYER}{number}.mlp.experts", of_each, config, config.experts)
        number, _, after = name.removeprefix(self.layers).partition(".")
        if name.startswith(self.layers) and (whole := self.whole.get(after)):
            return {f"{_LAYER}{number}.{whole}": Source(name, log=kind == "A_log")}
        if kind not in ("weight", "bias"):
            return {name: Source(name)}
        if not in_layer:
            there, size = self.outside.get(stem, stem), config.hidden_size
            if isinstance(there, str):
                return {there + dot + kind: Source(name)}
            parts = (range(first * size, (first + 1) * size) for first in range(len(there)))
            return {one + dot + kind: Source(name, rows) for one, rows in zip(there, parts, strict=True)}
        starred = _NUMBER.sub(".*.", own)
        inside = self.inside.get(starred, own)
        if config.experts is None:  # one MLP is that which mixtures of the family have for all tokens
            inside = _single(inside)
        if isinstance(inside, str) and (expert := _NUMBER.search(own)):
            inside = inside.replace("*", expert[1])
        stack = (inside,) if isinstance(inside, str) else inside
        found, factors = {}, dict(config.weight_factors)
        for part, rows in zip(stack, self._stacked(stack, config), strict=True):
            here = f"{_LAYER}{number}.{part}.{kind}"
            turned = own in self.transposed and kind == "weight"
            factor = factors.get(f"{part}.{kind}", 1.0)
            found[here] = Source(name, self._in_order(here, rows, config), turned, factor=factor)
        return found

    def _experts(
        self, name: str, begin: str, of_each: Sequence[str], config: ModelConfig, experts: Experts
    ) -> dict[str, Source]:
        """The matrices or biases of all experts in one tensor; `begin` is the decoder's prefix."""
        found, row, kinds = {}, 0, len(of_each) if self.in_turns else 1
        kind = "bias" if name.endswith("bias") else "weight"
        for number in range(experts.count):
            for place, part in enumerate(of_each):
                count = config.hidden_size if part == "down_proj" else experts.size
                first = row + (place if self.in_turns else place * count)
                rows = range(first, first + count * kinds - kinds + 1, kinds)
                found[f"{begin}.{number}.{part}.{kind}"] = Source(name, rows)
            row += count * len(of_each)
        return found

    def _stacked(self, stack: Sequence[str], config: ModelConfig) -> Sequence[Rows | None]:
        if len(stack) == 1:
            return [None]
        rows = {f"self_attn.{name}": size for name, size in config.query_rows(0).items()}
        rows |= dict.fromkeys(GATE_UP, config.intermediate_size)
        if config.experts is not None:
            rows |= {SHARED + name.removeprefix("mlp."): config.experts.shared_size for name in GATE_UP}
        recurrence = config.recurrence
        if recurrence is not None:
            rows |= {f"mixer.{name}": count for name, count in input_rows(recurrence).items()}
            rows |= {f"mixer.{name}": recurrence.heads for name in GATES}
        counts = tuple(rows[part] for part in stack)
        if tuple(stack) == GATED_QUERY:
            return _by_group(config.num_heads, counts)
        if self.by_key_head and tuple(stack) == QKV:
            return _by_group(config.num_kv_heads, counts)
        if recurrence is not None and tuple(stack) in (QKVZ, BETA_A):
            return _by_group(recurrence.groups, counts)
        ends = accumulate(counts, initial=0)
        return [range(start, stop) for start, stop in pairwise(ends)]

    def _in_order(self, name: str, rows: Rows | None, config: ModelConfig) -> Rows | None:
        """These rows, with those of rotated heads in the decoder's order."""
        if _ROTATED.search(name) is None:
            return rows
        rotated = None if config.rope is None else config.rope.rotated
        order = _head_order(config.head_dim, rotated, self.neighbours)
        if order is None:
            return rows
        heads = config.num_heads if "self_attn.q_" in name else config.num_kv_heads
        if "_norm." in name and config.qk_norm is not QkNorm.WHOLE:
            heads = 1
        return _reordered(range(heads * config.head_dim) if rows is None else rows, order)


class Sources:
    """The tensors of an open file under the decoder's names; unknown tensors keep their names.

    Raises ModelFileError if two tensors have the same name in the decoder, or a stack has a wrong number of
    rows.
    """

    def __init__(
        self, path: object, names: Names, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
    ) -> None:
        """`shapes` are the file's tensors; `path` is for messages."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._sources: dict[str, Source] = {}
        self._rows = {name: shape[0] for name, shape in shapes.items()}  # of the file's tensors
        self._turned = LastFew[Tensor](1)  # the transpose of a tensor, for its next rows
        for there, shape in shapes.items():
            found = names.sources(there, config)
            if any(source.transposed for source in found.values()):
                shape = shape[::-1]
            stacked = [source.rows for source in found.values() if source.rows is not None]
            if stacked and sum(map(len, stacked)) != shape[0]:
                raise ModelFileError(
                    f"{path}: tensor {there!r} has shape {list(shape)}, the config asks for "
                    f"{[sum(map(len, stacked)), *shape[1:]]}; config and weights belong to different models, "
                    "get both again"
                )
            for name, source in found.items():
                if name in self._sources:
                    raise ModelFileError(
                        f"{path}: tensors {self._sources[name].name!r} and {there!r} are both {name!r}; "
                        "get the file again"
                    )
                if name.endswith(_VECTORS) and len(shape) > 1:  # as a matrix, in GGUF files
                    source, shape = replace(source, flat=True), (math.prod(shape),)
                self._sources[name] = source
                self.shapes[name] = shape if source.rows is None else (len(source.rows), *shape[1:])
        inside = [f"{_LAYER}{layer}." for layer in range(config.num_layers)]
        for stem in names.ones:
            for prefix in [""] if stem.startswith("model.") else inside:
                self.shapes[f"{prefix}{stem}.weight"] = (config.hidden_size,)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> Source:
        return self._sources[name]

    def read(self, name: str, read: Callable[[str, int, int], Tensor], start: int, stop: int) -> Tensor:
        """Rows start..stop of a decoder's tensor; `read` reads rows of a file's tensor."""
        if name not in self._sources:
            return torch.ones(stop - start)
        source = self._sources[name]
        found = self._stored(name, source, read, start, stop)
        if source.log:
            return -torch.exp(found.float())
        return found if source.factor == 1.0 else found.float() * source.factor

    def _stored(
        self, name: str, source: Source, read: Callable[[str, int, int], Tensor], start: int, stop: int
    ) -> Tensor:
        """These rows with the elements of the file."""
        there, rows = source.name, source.rows
        if source.flat:
            return read(there, 0, self._rows[there]).flatten()[start:stop]
        if source.transposed:
            chosen = range(self.shapes[name][0]) if rows is None else rows
            turned = self._turned.get(there, lambda: read(there, 0, self.shapes[name][1]).T)
            return turned[torch.tensor(chosen[start:stop])]
        if rows is None:
            return read(there, start, stop)
        wanted = rows[start:stop]
        if isinstance(wanted, range) and wanted.step == 1:
            return read(there, wanted.start, wanted.stop)
        first = min(wanted)
        return read(there, first, max(wanted) + 1)[torch.tensor(wanted) - first]


def _head_order(size: int, rotated: int | None, neighbours: bool) -> tuple[int, ...] | None:
    """The place in the file of each element of a decoder's head; None if the orders are equal.

    In the decoder, pair i is elements i and i + size / 2 of a head, rotated or not.
    """
    if neighbours:
        return (*range(0, size, 2), *range(1, size, 2))
    if rotated is None or rotated == size:
        return None
    first, rest = rotated // 2, (size - rotated) // 2
    return (
        *range(first),
        *range(rotated, rotated + rest),
        *range(first, rotated),
        *range(rotated + rest, size),
    )


@cache
def _reordered(rows: Rows, order: tuple[int, ...]) -> tuple[int, ...]:
    """The rows of heads in this order; cached, since layers have the same shapes."""
    size = len(order)
    return tuple(rows[head + place] for head in range(0, len(rows), size) for place in order)


def _single(inside: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(inside, str):
        return inside.replace(SHARED, "mlp.")
    return tuple(name.replace(SHARED, "mlp.") for name in inside)


@cache
def _by_group(groups: int, counts: tuple[int, ...]) -> tuple[Rows, ...]:
    """The rows of each of the stacked matrices of these sizes; each group has its part of all."""
    size = sum(counts) // groups
    ends = accumulate((count // groups for count in counts), initial=0)
    return tuple(
        tuple(row for first in range(0, groups * size, size) for row in range(first + begin, first + end))
        for begin, end in pairwise(ends)
    )
