"""A tiny model larger than its given memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.engine import memory
from specinfer.kernels.disk import DiskRate
from specinfer.models.expert_stream import expert_records
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.placement import ExpertMemory, Placement
from specinfer.models.streamed import layer_records
from specinfer.models.weights import load_streamed, prepare
from specinfer.runtime import kv_cache
from tests.kernels import kernels, library_or_skip
from tests.tiny_models import write_tiny_llama

LAYERS = 8
# Half of the bfloat16 layers of `write_large`'s model do not fit beside its quantized copy and KV caches.
OPTIONS: dict[str, Any] = {"memory": 7_100_000, "kv_cache_memory": 3 << 20, "offload": "auto"}
FLAGS = ("--memory", "7100000", "--kv-cache-memory", "3MB", "--offload", "auto")
# so slow that the quantized copy pays
DISK = DiskRate(readers=1, piece=1 << 20, bytes_per_second=1e7, direct=True)


def count_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only models as used memory, since Python is larger than any tiny model.

    Fix the speed of disk and memory. Skips the test without native kernels.
    """
    library_or_skip()
    for module in (memory, kv_cache):
        monkeypatch.setattr(module, "process_bytes", lambda: 0)
    for name in ("_SLACK", "MAX_BYTES"):
        monkeypatch.setattr(memory, name, 0)
    monkeypatch.setattr(memory, "_SAMPLE", 1 << 20)
    monkeypatch.setattr(memory, "measure", lambda source: DISK)


def write_large(folder: Path) -> Path:
    """Write a tiny model most of whose bytes are in layers, and return the folder."""
    return write_tiny_llama(
        folder,
        vocab_size=128,
        hidden_size=128,
        intermediate_size=512,
        num_layers=LAYERS,
        num_kv_heads=1,
        max_context=900,
        spread=0.1,
        tokenizer=True,
    )


def load_experts(model: Path, slots: int, *, cache: Path | None = None, **options: Any) -> LanguageModel:
    """Load a mixture whose experts are read into this number of slots; all else is in memory.

    It is float32, unquantized and native unless `options` say otherwise. Its prepared file is in `cache`, by
    default in the model's folder.
    """
    opened, cache = open_model(model), cache or model / "kept"
    given = {"dtype": torch.float32, "kernels": kernels("native"), "quantization": "none"} | options
    prepared = prepare(opened, cache=cache, **{name: given[name] for name in given if name != "part"})
    names, experts = expert_records(prepared), opened.config.experts
    longest = max(prepared.records[name].length for name in names)
    room = ExpertMemory(experts, len(names) // experts.count, longest, slots)
    layers = [prepared.records[name].length for name in layer_records(prepared)]
    disk = DiskRate(readers=2, piece=4096, bytes_per_second=1e9, direct=True)
    return load_streamed(opened, prepared, Placement(1 << 30, {}, layers, 0, (), room), disk, **given)
