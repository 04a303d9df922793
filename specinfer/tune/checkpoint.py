"""A training on disk: one safetensors file, replaced as a whole, so that some state of it is always there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError, TuneError
from specinfer.models.safetensors import FLOATS, read_entries, write_safetensors
from specinfer.tune.trainer import Trained, Trainer

_DTYPES: Final = {**FLOATS, "I64": torch.int64, "U8": torch.uint8}
_FACTS: Final = "facts"  # JSON, as bytes


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What was read."""

    tensors: dict[str, Tensor]
    state: Trained
    shape: Mapping[str, object]  # of the head, and of what it is trained for

    @property
    def ids(self) -> list[int]:
        """The tokens the head can name."""
        return [int(token) for token in self.tensors["ids"]]


def write_checkpoint(path: Path, trainer: Trainer, shape: Mapping[str, object]) -> None:
    """Write all that a training needs to go on; raises OSError."""
    facts = json.dumps({"state": asdict(trainer.state), "shape": dict(shape)}).encode()
    tensors = {name: tensor.contiguous() for name, tensor in trainer.tensors()}
    tensors[_FACTS] = torch.frombuffer(bytearray(facts), dtype=torch.uint8)
    write_safetensors(path, tensors, mode=0o600)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raises TuneError where it is damaged."""
    try:
        entries = read_entries([path], _DTYPES)
        tensors = {name: entry.read_rows(0, entry.shape[0]) for name, entry in entries.items()}
        facts = json.loads(tensors.pop(_FACTS).numpy().tobytes())
        known = {one.name for one in fields(Trained)}
        state = Trained(**{name: value for name, value in facts["state"].items() if name in known})
        return Checkpoint(tensors, state, dict(facts["shape"]))
    except (ModelFileError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TuneError(
            f"{path} is damaged ({error}); remove it, and training begins anew on what was collected"
        ) from error
