"""Real model files, where they are on this machine; tests that need others are skipped, and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specinfer.files import cache_dir
from specinfer.hub import CATALOGUE


def model_path(file: str) -> str:
    """The path of a model file in SPECINFER_MODELS, in the benchmarks' folder or among pulled models."""
    folders = [Path.home() / ".cache" / "specinfer-bench"]
    folders += [cache_dir() / "models" / name for name in CATALOGUE]
    if own := os.environ.get("SPECINFER_MODELS"):
        folders.insert(0, Path(own))
    for folder in folders:
        if (folder / file).is_file():
            return str(folder / file)
    pytest.skip(f"{file} is not on this machine; set SPECINFER_MODELS to the folder it lies in")


def smollm2() -> str:
    return model_path("SmolLM2-135M-Instruct.Q4_1.gguf")


def qwen_draft() -> str:
    return model_path("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
