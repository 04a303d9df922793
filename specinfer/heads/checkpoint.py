"""A head's folder: config.json and safetensors, checked against each other and against the target.

A matrix may be int8, with a tensor of its name and `_scale` that has what to multiply each row by.

Nothing of it is trusted: sizes, names, shapes, ids and numbers are checked before anything is computed, and
what cannot be used is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig, check_target
from specinfer.heads.eagle import EagleHead
from specinfer.heads.foreign_config import config_from_json, is_head_config, named_as_here
from specinfer.heads.shapes import head_shapes
from specinfer.heads.vocabulary import Tables, id_maps
from specinfer.hub.model_files import ModelFiles, local_model, read_json
from specinfer.models.config import ModelConfig
from specinfer.models.safetensors import FLOATS, TensorEntry, read_entries
from specinfer.models.weights import OpenModel

_DTYPES: Final = {
    **FLOATS,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
SCALE: Final = "_scale"  # behind the name of an int8 matrix: what to multiply its rows by
_ROWS: Final = 1 << 8  # of a table that are chosen at a time


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head, as far as its config.json says.

    Raises ModelFileError where that is no config.
    """
    file = folder / "config.json"
    return file.is_file() and is_head_config(read_json(file))


class HeadFolder:
    """An open head, whose tensors are what its config promises, for a target that it fits; reads no weights.

    Its tensors have the names of heads.shapes. It is an OpenModel but for the config.
    """

    def __init__(self, files: ModelFiles | Path, target: ModelConfig) -> None:
        """Raises ModelError and its kind where the head cannot be used."""
        if isinstance(files, Path):
            files = local_model(str(files), files)
        self.path = files.path
        config = config_from_json(read_json(files.path / "config.json"), target.num_layers)
        entries = _renamed(files.path, read_entries(files.weights, _DTYPES))
        config = _with_tables(config, entries)
        check_target(config, target, files.name)
        self.config: EagleConfig | BlockConfig = config
        self.ids = _ids(files.path, config, entries)
        self._entries = _checked(files.path, entries, head_shapes(config))
        self._scales = {
            name: entries[name + SCALE] for name, entry in self._entries.items() if entry.dtype == torch.int8
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor that computes."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the file's dtype, or float32 where that is int8.

        Raises ModelFileError where one of them is not a finite number.
        """
        rows = self._entries[name].read_rows(start, stop)
        if name in self._scales:
            rows = rows.float() * self._scales[name].read_rows(start, stop).float()[:, None]
        if not bool(torch.isfinite(rows).all()):
            raise ModelFileError(
                f"{self.path}: tensor {name!r} holds values that are no finite numbers; get the head again"
            )
        return rows

    def module(self, target: OpenModel) -> EagleHead | BlockHead:
        """The head as a module of float32, with tables of the target's where it has none of its own."""
        config = self.config
        tables = Tables(
            self._tensor("embed_tokens.weight") if config.own_embedding else target_embedding(target),
            self._tensor("lm_head.weight") if config.own_head else target_head(target, self.ids),
        )
        module = (
            EagleHead(config, self.ids, tables)
            if isinstance(config, EagleConfig)
            else BlockHead(config, self.ids, tables)
        )
        state = {name: self._tensor(name) for name in self._entries}
        module.load_state_dict(state, strict=False)
        return module

    def _tensor(self, name: str) -> Tensor:
        return self.read_rows(name, 0, self._entries[name].shape[0]).float()


def target_embedding(target: OpenModel) -> Tensor:
    """The target's embeddings, float32 [V, D]."""
    name = "model.embed_tokens.weight"
    return target.read_rows(name, 0, target.shapes[name][0]).float()


def target_head(target: OpenModel, ids: Sequence[int]) -> Tensor:
    """The rows of the target's output layer for these tokens, which ascend, in float32 [U, D]."""
    name = "lm_head.weight" if "lm_head.weight" in target.shapes else "model.embed_tokens.weight"
    parts: list[Tensor] = []
    for start in range(0, len(ids), _ROWS):
        wanted = torch.tensor(ids[start : start + _ROWS])
        first = int(wanted[0])
        parts.append(target.read_rows(name, first, int(wanted[-1]) + 1)[wanted - first].float())
    return torch.cat(parts)


def _renamed(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    renamed = {named_as_here(name): entry for name, entry in entries.items()}
    if len(renamed) < len(entries):
        raise ModelFileError(f"{path} has a layer twice, as 'midlayer' and 'layers.0'; get the head again")
    return renamed


def _with_tables(
    config: EagleConfig | BlockConfig, entries: Mapping[str, TensorEntry]
) -> EagleConfig | BlockConfig:
    return replace(
        config, own_embedding="embed_tokens.weight" in entries, own_head="lm_head.weight" in entries
    )


def _ids(path: Path, config: EagleConfig | BlockConfig, entries: Mapping[str, TensorEntry]) -> Sequence[int]:
    """The tokens the head can name: of d2t, which t2d has to agree with where it is there."""
    named, vocab = config.draft_vocab_size, config.body.vocab_size
    if "d2t" not in entries:
        if named == vocab:
            return range(vocab)
        raise ModelFileError(f"{path} can name {named} of {vocab} tokens, and lacks 'd2t', which says which")
    d2t = _whole(path, entries, "d2t", named)
    if d2t.is_floating_point() or d2t.dtype in (torch.bool, torch.uint8):
        raise ModelFileError(f"{path}: tensor 'd2t' is of {d2t.dtype}; expected whole numbers")
    ids = (d2t.to(torch.int64) + torch.arange(named)).tolist()
    try:
        _, kept = id_maps(ids, vocab)
    except ModelError as error:
        raise ModelFileError(f"{path}: tensor 'd2t' is damaged: {error}") from error
    if "t2d" in entries and not torch.equal(_whole(path, entries, "t2d", vocab).to(torch.bool), kept):
        raise ModelFileError(f"{path}: tensors 'd2t' and 't2d' name different tokens; get the head again")
    return [int(i) for i in ids]


def _whole(path: Path, entries: Mapping[str, TensorEntry], name: str, length: int) -> Tensor:
    entry = entries[name]
    if entry.shape != (length,):
        raise ModelFileError(f"{path}: tensor {name!r} has shape {list(entry.shape)}, expected [{length}]")
    return entry.read_rows(0, length)


def _checked(
    path: Path, entries: Mapping[str, TensorEntry], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorEntry]:
    """The tensors that compute: all of these, in these shapes, and no others."""
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise ModelFileError(f"{path} lacks tensor {missing[0]!r}; the head is incomplete, get it again")
    for name, shape in wanted.items():
        entry = entries[name]
        scaled = (
            entry.dtype == torch.int8 and len(shape) == 2 and _scales_rows(entries.get(name + SCALE), entry)
        )
        if entry.shape != shape or not (entry.dtype.is_floating_point or scaled):
            raise ModelFileError(
                f"{path}: tensor {name!r} is {entry.dtype} of {list(entry.shape)}, the config asks for "
                f"numbers of {list(shape)}; config and weights belong to different heads"
            )
    scales = {name + SCALE for name in wanted if entries[name].dtype == torch.int8}
    extra = [name for name in entries if name not in wanted and name not in {"d2t", "t2d", *scales}]
    if extra:
        raise ModelFileError(
            f"{path} has an unexpected tensor {extra[0]!r}; ignoring weights would change what it guesses"
        )
    return {name: entries[name] for name in wanted}


def _scales_rows(scale: TensorEntry | None, matrix: TensorEntry) -> bool:
    """Whether a tensor has a factor for each row of a matrix."""
    return scale is not None and scale.dtype.is_floating_point and scale.shape == matrix.shape[:1]
