"""The tokens that a head can name, as its file says, and its tensors in the order of these tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.config import BlockConfig, EagleConfig, MedusaConfig
from specinfer.heads.medusa_config import TOKEN_MAP
from specinfer.heads.vocabulary import id_maps
from specinfer.models.safetensors import TensorEntry


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some rows of a tensor, in an order of their own, as a tensor."""

    entry: TensorEntry
    rows: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        """The file's."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the chosen rows alone."""
        return (len(self.rows), *self.entry.shape[1:])

    def read_rows(self, start: int, stop: int) -> Tensor:
        """As TensorEntry."""
        wanted = self.rows[start:stop]
        parts = [torch.empty(0, *self.entry.shape[1:], dtype=self.dtype)]
        first = 0
        for i in range(1, len(wanted) + 1):
            if i == len(wanted) or wanted[i] != wanted[i - 1] + 1:  # rows that follow each other at once
                parts.append(self.entry.read_rows(wanted[first], wanted[i - 1] + 1))
                first = i
        return torch.cat(parts)


Entries = Mapping[str, TensorEntry | ChosenRows]


def named_by_map(path: Path, config: MedusaConfig, entries: Entries) -> tuple[Sequence[int], Entries]:
    """The tokens that Medusa's heads can name, ascending, and the tensors with their rows in this order."""
    named, vocab = config.draft_vocab_size, config.vocab_size
    if named == vocab:  # then vLLM ignores a map: rows are in the order of tokens
        return range(vocab), {name: entry for name, entry in entries.items() if name != TOKEN_MAP}
    if TOKEN_MAP not in entries:
        raise ModelFileError(f"{path} can name {named} of {vocab} tokens, and lacks {TOKEN_MAP!r}")
    tokens = _whole_numbers(path, entries, TOKEN_MAP, named)
    ids, order = tokens.sort()
    try:
        id_maps(ids.tolist(), vocab)
    except ModelError as error:
        raise ModelFileError(f"{path}: tensor {TOKEN_MAP!r} is damaged: {error}") from error
    chosen = dict(entries)
    del chosen[TOKEN_MAP]
    for name in [name for name in chosen if name.startswith("lm_heads.")]:
        entry = entries[name]
        assert isinstance(entry, TensorEntry)
        if entry.shape[:1] == (vocab,):
            chosen[name] = ChosenRows(entry, ids.tolist())
        elif entry.shape[:1] == (named,):
            chosen[name] = ChosenRows(entry, order.tolist())
    return ids.tolist(), chosen


def named_by_offsets(path: Path, config: EagleConfig | BlockConfig, entries: Entries) -> Sequence[int]:
    """The tokens the head can name: of d2t, which t2d has to agree with where it is there."""
    named, vocab = config.draft_vocab_size, config.body.vocab_size
    if "d2t" not in entries:
        if named == vocab:
            return range(vocab)
        raise ModelFileError(f"{path} can name {named} of {vocab} tokens, and lacks 'd2t', which says which")
    ids = (_whole_numbers(path, entries, "d2t", named) + torch.arange(named)).tolist()
    try:
        _, kept = id_maps(ids, vocab)
    except ModelError as error:
        raise ModelFileError(f"{path}: tensor 'd2t' is damaged: {error}") from error
    if "t2d" in entries and not torch.equal(_whole(path, entries, "t2d", vocab).to(torch.bool), kept):
        raise ModelFileError(f"{path}: tensors 'd2t' and 't2d' name different tokens; get the head again")
    return [int(i) for i in ids]


def _whole_numbers(path: Path, entries: Entries, name: str, length: int) -> Tensor:
    numbers = _whole(path, entries, name, length)
    if numbers.is_floating_point() or numbers.dtype in (torch.bool, torch.uint8):
        raise ModelFileError(f"{path}: tensor {name!r} is of {numbers.dtype}; expected whole numbers")
    return numbers.to(torch.int64)


def _whole(path: Path, entries: Entries, name: str, length: int) -> Tensor:
    entry = entries[name]
    if entry.shape != (length,):
        raise ModelFileError(f"{path}: tensor {name!r} has shape {list(entry.shape)}, expected [{length}]")
    return entry.read_rows(0, length)
