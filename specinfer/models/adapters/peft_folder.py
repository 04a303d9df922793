"""PeftFolder: reads adapter_config.json and adapter_model.safetensors of a PEFT folder.

A folder is checked completely before it is used: each tensor against its config and model, and the config's
modules against the tensors. A mismatch is rejected with a one-line message that names it.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.model_files import PICKLES, read_json
from specinfer.kernels.library import Library
from specinfer.kernels.low_rank import (
    DOWN,
    OUT,
    PER_LAYER,
    QKV,
    UP,
    Adapter,
    LowRank,
    LowRankPart,
    matrix_bytes,
    part_bytes,
)
from specinfer.kernels.recurrence_config import LayerKind, input_rows
from specinfer.models.adapters.adapter_config import AdapterConfig, adapter_config
from specinfer.models.config import ModelConfig
from specinfer.models.families.registry import HF_FAMILIES
from specinfer.models.quantized.pieces import TensorEntry
from specinfer.models.safetensors import read_entries
from specinfer.models.sources import Rows

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_TEXT_PART: Final = re.compile(r"\b(?:language|text)_model\.")  # of models with other senses
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


class Slot(NamedTuple):
    """The place of a decoder matrix among the model's products."""

    product: int
    channels: range
    inner: int


def slots(config: ModelConfig) -> dict[str, Slot]:
    """The decoder's matrices that may have adapters, by name without `.weight`; experts may not.

    A recurrent block beside attention has the numbers of a layer behind the model's last.
    """
    return {
        f"model.layers.{layer}.{name}": slot._replace(product=PER_LAYER * layer + slot.product)
        for layer in range(config.num_layers)
        for name, slot in _slots_in_layer(config, layer).items()
    }


def _slots_in_layer(config: ModelConfig, layer: int) -> dict[str, Slot]:
    """The matrices of one layer, with the numbers of its products."""
    hidden, inner, rows = config.hidden_size, config.inner_of(layer), config.query_rows(layer)
    found: dict[str, Slot] = {}
    if layer in config.attention_layers:
        found = _stacked("self_attn.", rows, QKV, hidden)
        found["self_attn.o_proj"] = Slot(OUT, range(hidden), rows["q_proj"])
    if layer in config.recurrent_layers and (r := config.recurrence) is not None:
        first = PER_LAYER * config.num_layers if found else 0
        found |= _stacked("mixer.", input_rows(r), first + QKV, hidden)
        found["mixer.out_proj"] = Slot(first + OUT, range(hidden), r.heads * r.value_size or r.channels)
    if config.experts_of(layer) is None and layer not in config.layers_without_mlp:
        names = ("gate_proj", "up_proj")[not config.gated_mlp :]
        found |= _stacked("mlp.", dict.fromkeys(names, inner), UP, hidden)
        found["mlp.down_proj"] = Slot(DOWN, range(hidden), inner)
    return found


def _stacked(prefix: str, rows: Mapping[str, int], product: int, inner: int) -> dict[str, Slot]:
    """Matrices that a product stacks, by name, with their rows."""
    ends = accumulate(rows.values(), initial=0)
    return {
        f"{prefix}{name}": Slot(product, range(begin, end), inner)
        for name, (begin, end) in zip(rows, pairwise(ends), strict=True)
    }


class AdaptedMatrix(NamedTuple):
    """One of the decoder's matrices in a module of the file."""

    slot: Slot
    rows: Rows | None  # rows of the module; None is all
    factor: float  # of these rows


class AdaptedModule(NamedTuple):
    """A linear module of the model, as in its files."""

    name: str
    layer: int
    matrices: tuple[AdaptedMatrix, ...]


def modules(config: ModelConfig) -> dict[str, AdaptedModule]:
    """The linear modules of a model that may have adapters, by their names in Hugging Face files."""
    names, there = HF_FAMILIES[config.family.value].names, slots(config)
    kinds = dict.fromkeys(name.split(".", 3)[3] for name in there)
    found: dict[str, AdaptedModule] = {}
    for layer in range(config.num_layers):
        inside = set[str]()  # matrices that have another name in files
        for kind in (*names.inside, *kinds):
            name = f"{names.layers}{layer}.{kind}"
            sources = names.sources(f"{name}.weight", config)
            parts = {one.removesuffix(".weight"): source for one, source in sources.items()}
            if parts.keys() <= there.keys() and kind not in inside:
                matrices = tuple(
                    AdaptedMatrix(there[one], source.rows, source.factor) for one, source in parts.items()
                )
                found[name] = AdaptedModule(name, layer, matrices)
                inside |= {one.split(".", 3)[3] for one in parts}
    return found


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """The two tensors of one module's adapter, not yet read."""

    module: AdaptedModule
    down: TensorEntry  # A
    up: TensorEntry  # B
    names: tuple[str, str]
    scale: float


class PeftFolder:
    """An adapter's folder, checked against a model; tensor values are not read."""

    def __init__(self, name: str, path: Path, config: ModelConfig) -> None:
        """Raises ModelError if it is not supported, ModelFileError if it is damaged or does not fit."""
        self.name, self.path = name, path
        if not path.is_dir():
            raise ModelFileError(f"adapter {name!r}: {path} is not a folder; give one that PEFT has saved")
        files = path / _CONFIG, path / _WEIGHTS
        for file in files:
            if not file.is_file():
                raise ModelFileError(f"adapter {name!r}: {path} has no {file.name}; {self._instead()}")
        self._files = files
        layers = config.num_layers * (2 if LayerKind.BOTH in config.layer_kinds else 1)
        self._products = PER_LAYER * layers  # products of the model, with and without adapters
        self._initial_state = self._state()
        try:
            self._own = adapter_config(read_json(files[0]))
            self._adapters = self._checked(config, self._own, read_entries([files[1]]))
        except ModelError as error:
            raise type(error)(f"adapter {name!r} ({path}): {error}") from None

    def digest(self) -> str:
        """A hash of its files."""
        found = hashlib.sha256()
        for file in self._files:
            found.update(file.read_bytes())
        return found.hexdigest()

    def bytes(self, weights: torch.dtype) -> int:
        """The bytes of its matrices in blocks of rows (kernels/low_rank.py); `weights` as for `load`."""
        ranks: Counter[tuple[int, int]] = Counter()  # rows of A by product and inner elements
        found = 0
        for one in self._adapters:
            rank, inner = one.down.shape
            ranks[one.module.matrices[0].slot.product, inner] += rank
            found += sum(part_bytes(part.slot.channels, rank, weights) for part in one.module.matrices)
        return found + sum(matrix_bytes(rank, inner, weights) for (_, inner), rank in ranks.items())

    def load(self, weights: torch.dtype, device: torch.device, library: Library | None) -> Adapter:
        """Read its tensors, as int8 or in the dtype of the model.

        Raises ModelFileError if a value is not finite, or if files were changed since they were checked.
        """
        dtype = torch.float32 if weights is torch.int8 else weights
        of_product: dict[int, list[ModuleAdapter]] = {}
        for one in self._adapters:
            of_product.setdefault(one.module.matrices[0].slot.product, []).append(one)

        def made(number: int) -> LowRank | None:
            if number not in of_product:
                return None
            downs, parts, first = list[Tensor](), list[LowRankPart](), 0
            for one in of_product[number]:
                down, up = (
                    self._read(entry, name, dtype, device)
                    for entry, name in zip((one.down, one.up), one.names, strict=True)
                )
                ranks = range(first, first + len(down))
                for matrix in one.module.matrices:
                    rows = up if matrix.rows is None else up[torch.tensor([*matrix.rows], device=device)]
                    scale = one.scale * matrix.factor
                    parts.append(LowRankPart(matrix.slot.channels, ranks, rows.contiguous(), scale))
                downs.append(down)
                first = ranks.stop
            term = LowRank(torch.cat(downs), parts)
            return term.to_int8() if weights is torch.int8 else term

        # Product by product, so that the tensors as read take little memory.
        adapter = Adapter.of(map(made, range(self._products)), self.bytes(weights), library)
        if self._state() != self._initial_state:
            raise ModelFileError(
                f"adapter {self.name!r} ({self.path}): its files were changed since it was named; "
                "give the new ones another name"
            )
        return adapter

    def _read(self, entry: TensorEntry, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = entry.read_rows(0, entry.shape[0]).to(device=device, dtype=dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ModelFileError(
                f"adapter {self.name!r} ({self.path}): tensor {name!r} holds values that are not finite "
                f"{str(dtype).removeprefix('torch.')} numbers; get it again"
            )
        return tensor

    def _state(self) -> list[tuple[int, int]]:
        return [((found := file.stat()).st_size, found.st_mtime_ns) for file in self._files]

    def _instead(self) -> str:
        pickles = sorted(file.name for file in self.path.glob("adapter_model.*") if file.suffix in PICKLES)
        if not pickles:
            return "give a folder that PEFT has saved"
        return (
            f"{pickles[0]} is pickled, which can run any code and is never read: save the adapter as "
            "safetensors (save_pretrained does so)"
        )

    def _checked(
        self, config: ModelConfig, own: AdapterConfig, entries: Mapping[str, TensorEntry]
    ) -> list[ModuleAdapter]:
        known = modules(config)
        halves: dict[str, dict[str, str]] = {}  # module -> A or B -> tensor name
        for name in entries:
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise ModelError(
                    f"tensor {name!r} is not a low-rank adapter's lora_A or lora_B of a linear module; DoRA, "
                    "biases, embeddings and modules_to_save are not supported: merge it into the model"
                )
            module = _TEXT_PART.sub("", match[1], count=1)
            module = module.replace("backbone.", "model.", 1)  # in Nemotron-H's own code
            if module not in known:
                raise ModelError(
                    f"tensor {name!r} is for a module that cannot have adapters here; allowed: "
                    f"{', '.join(_kinds(known))} of {config.num_layers} layers. It is for another model, or "
                    "must be merged into this one"
                )
            halves.setdefault(module, {})[match[2]] = name
            if not own.adapts(match[1], known[module].layer):
                key = "layers_to_transform" if own.layers is not None else "target_modules"
                raise ModelFileError(f"tensor {name!r} is for a module that {key} does not include")
        # Families have several names for some matrices.
        adapted = {one.slot for module in halves for one in known[module].matrices}
        missing = next(
            (
                one
                for one in known.values()
                if own.adapts(one.name, one.layer) and not {part.slot for part in one.matrices} <= adapted
            ),
            None,
        )
        if missing is not None:
            raise ModelFileError(f"target_modules includes {missing.name}, but there is no tensor for it")
        if not halves:
            wanted = own.targets if isinstance(own.targets, str) else ", ".join(own.targets)
            raise ModelError(
                f"target_modules is {wanted}, which matches no module of the model; it has "
                f"{', '.join(_kinds(known))}"
            )
        return [self._module(known[module], names, own, entries) for module, names in halves.items()]

    def _module(
        self,
        module: AdaptedModule,
        names: Mapping[str, str],
        own: AdapterConfig,
        entries: Mapping[str, TensorEntry],
    ) -> ModuleAdapter:
        if len(names) < 2:
            [found] = names.values()
            raise ModelFileError(f"tensor {found!r} lacks the other half of its adapter (lora_A, lora_B)")
        down, up = entries[names["A"]], entries[names["B"]]
        raw = _TENSOR.fullmatch(names["A"])
        assert raw is not None, "checked above"
        rank = own.rank_of(raw[1])
        inner = module.matrices[0].slot.inner
        channels = sum(len(one.slot.channels) for one in module.matrices)
        for name, entry, shape, place in (
            (names["A"], down, (rank, inner), 0),
            (names["B"], up, (channels, rank), 1),
        ):
            if len(entry.shape) == 2 and entry.shape[place] != rank:
                raise ModelFileError(
                    f"tensor {name!r} has shape {list(entry.shape)}, and the config's rank is {rank}"
                )
            if entry.shape != shape:
                raise ModelFileError(
                    f"tensor {name!r} has shape {list(entry.shape)}, the model needs {list(shape)}; it is an "
                    "adapter for another model"
                )
        return ModuleAdapter(module, down, up, (names["A"], names["B"]), own.scale_of(raw[1]))


def _kinds(known: Mapping[str, AdaptedModule]) -> list[str]:
    """The modules of layers."""
    return [*dict.fromkeys(name.rsplit(".", 1)[1] for name in known)]
