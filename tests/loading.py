"""Tiny models on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specinfer.kernels.choice import Kernels
from specinfer.models.open_model import OpenModel
from specinfer.models.weights import load_model
from tests.kernels import kernels

CPU = torch.device("cpu")


def load(model: OpenModel | Path, run: Kernels | str = "native", **options: Any) -> Any:
    """Load a model, in float32 unless `options` say otherwise; what is kept of it is in its own folder."""
    path = model if isinstance(model, Path) else model.path
    kept = (path if path.is_dir() else path.parent) / "kept"
    chosen = kernels(run) if isinstance(run, str) else run  # type: ignore[arg-type]
    return load_model(
        model, **{"dtype": torch.float32, "device": CPU, "kernels": chosen, "cache": kept, **options}
    )
