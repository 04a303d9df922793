"""Fingerprint of an engine: equal for engines with the same numbers, to the bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import torch

from specinfer.config import ENGINE_OPTIONS, EngineConfig
from specinfer.engine.models import Models
from specinfer.version import VERSION

# Options, and parts of a config, that change no output text.
_MEMORY: Final = ("memory", "offload", "offload_folder", "prepared", "max_loras")
_FOLDERS: Final = ("lora",)  # the adapters' files do, but `models.origin` covers them
# Ranks change a text only by the number of parts of each sum, which `engine_fingerprint` adds.
_RANKS: Final = ("tensor_parallel", "pipeline_parallel", "master", "key_file", "local_ranks", "sum_parts")
_WITHOUT_EFFECT: Final = {"speculation", "cache", "scheduler", "threads", *_RANKS, *_MEMORY, *_FOLDERS}


def engine_fingerprint(config: EngineConfig, models: Models) -> str:
    """Hash that is equal for engines which produce the same text for the same work.

    It covers the target's files, the options that affect its logits, the kernels and the package's code. It
    does not cover drafts.
    """
    kernels, library = models.target.kernels, models.target.kernels.library
    options = {
        name: getattr(config if part is None else getattr(config, part), one.attribute)
        for name, (part, one) in ENGINE_OPTIONS.items()
        if not {name, part} & _WITHOUT_EFFECT
    }
    parts: list[object] = [
        dict(models.origin),
        options,
        config.parts_of_sums,
        [type(part).__name__ for part in (kernels.ops, kernels.attention, kernels.products)],
        [str(models.target.device), torch.__version__, VERSION],
        # The order of PyTorch's sums depends on its number of threads.
        torch.get_num_threads() if library is None else library.level.name,
    ]
    found = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    if library is not None:
        found.update(library.path.read_bytes())
    root = Path(__file__).parents[1]  # the package
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()
