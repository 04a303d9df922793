"""Checkpoint tensors by parameter name, using transformers' rules for renaming, stacking and splitting.

Files often hold experts one by one, while the code has one parameter for all experts of a layer;
transformers' conversions define the mapping. They run on meta tensors to find names and shapes, and on as few
tensors as possible when an expert is read.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from specinfer.errors import UnhostedError
from specinfer.kernels.file_blocks import StoredRows
from specinfer.models.quantized.pieces import LastFew, StoredTensor, TensorEntry, whole

_KEPT: Final = 4  # whole tensors kept, since their rows are read in sequence


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Tensors of files that are converted together to one or more parameters."""

    converter: Any  # transformers'
    first: str  # the parameter that identifies the targets
    sources: tuple[tuple[str, str], ...]  # a pattern of the converter, a tensor's name

    def made(self, model: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Convert these tensors, one per source, to parameters by name."""
        converter = copy.deepcopy(self.converter)
        for (pattern, name), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        try:
            made = converter.convert(self.first, model=model, config=model.config)
        except Exception as error:
            raise UnhostedError(f"has {self.first} in a form that cannot be converted ({error})") from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def of_expert(self, number: int) -> Self | None:
        """The conversion for one expert's tensors, if each makes a separate slice; else None."""
        first, *others = self.converter.operations
        along = [getattr(operation, "dim", None) for operation in others]
        if type(first).__name__ != "MergeModulelist" or first.dim != 0 or not all(along):
            return None
        own: dict[str, list[str]] = {}
        for pattern, name in self.sources:
            own.setdefault(pattern, []).append(name)
        sources = tuple((pattern, names[number]) for pattern, names in own.items())
        return replace(self, sources=sources)


class ParameterFiles:
    """The tensors of files, by parameter."""

    def __init__(self, path: Path, entries: Mapping[str, StoredTensor], model: Any) -> None:
        """Reads no weights; raises UnhostedError if tensors cannot be converted."""
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.path = path
        self.unused: list[str] = []  # names of tensors without a parameter
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._entries = entries
        self._model = model
        self._plain: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        self._last = LastFew[Tensor](_KEPT)
        wanted = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for name in sorted(entries, key=loading.dot_natural_key):
            prefix = model.base_model_prefix
            parameter, pattern = loading.rename_source_key(name, renamings, converters, prefix, wanted)
            if parameter not in wanted and name in wanted:
                parameter, pattern = loading.rename_source_key(name, [], [], prefix, wanted)
            if parameter not in wanted:
                self.unused.append(name)
            elif pattern is None:
                self._plain[parameter] = name
                self.shapes[parameter] = entries[name].shape
            else:
                _, sources = groups.setdefault(parameter, (by_pattern[pattern], []))
                sources.append((pattern, name))
        for first, (converter, sources) in groups.items():
            conversion = _Conversion(converter, first, tuple(sources))
            shapes = [torch.empty(entries[name].shape, device="meta") for _, name in sources]
            for parameter, made in conversion.made(model, shapes).items():
                self._converted[parameter] = conversion
                self.shapes[parameter] = tuple(made.shape)

    def dtype(self, parameter: str) -> torch.dtype | None:
        """The dtype of a parameter in files; None if it is quantized."""
        name = self._plain.get(parameter)
        return self._entries[self._converted[parameter].sources[0][1] if name is None else name].dtype

    def read_rows(self, parameter: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a parameter, on the CPU, in the files' dtype."""
        name = self._plain.get(parameter)
        if name is None or not self._entries[name].shape:
            matrix = self.matrix(parameter, None)
            return matrix[start:stop] if matrix.dim() else matrix.view(1)
        return self._entries[name].read_rows(start, stop)

    def stored(self, parameter: str) -> StoredRows | None:
        """The place of a parameter in its file; None if its elements are not those of rows of the file."""
        entry = self._entries.get(self._plain.get(parameter, ""))
        return entry.stored(parameter) if isinstance(entry, TensorEntry) and len(entry.shape) == 2 else None

    def matrix(self, parameter: str, expert: int | None) -> Tensor:
        """A whole parameter, or one slice along its first dimension."""
        return self._last.get((parameter, expert), lambda: self._read(parameter, expert))

    def _read(self, parameter: str, expert: int | None) -> Tensor:
        name = self._plain.get(parameter)
        if name is not None:
            if expert is not None:
                return self._entries[name].read_rows(expert, expert + 1)[0]
            return self._read_entry(name)
        conversion = self._converted[parameter]
        of_expert = None if expert is None else conversion.of_expert(expert)
        used = of_expert or conversion
        made = used.made(self._model, [self._read_entry(name) for _, name in used.sources])[parameter]
        if expert is None:
            return made
        return made[0] if of_expert is not None else made[expert].clone()

    def _read_entry(self, name: str) -> Tensor:
        entry = self._entries[name]
        return whole(entry).view(entry.shape)
