"""specinfer: tree-based speculative inference for large language models; the same text, sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specinfer.version import VERSION as __version__

if TYPE_CHECKING:
    from specinfer.config import EngineConfig
    from specinfer.errors import SpecInferError, UserError
    from specinfer.llm import LLM
    from specinfer.request import FinishReason, RequestOutput, SpeculationFigures
    from specinfer.sampling_params import SamplingParams, SpeculationParams
    from specinfer.speculate.speculator import Speculator
    from specinfer.tree.token_tree import TokenTree

# Imported when first asked for, so that `specinfer --help` answers without loading torch.
_HOMES = {
    "EngineConfig": "specinfer.config",
    "FinishReason": "specinfer.request",
    "LLM": "specinfer.llm",
    "RequestOutput": "specinfer.request",
    "SamplingParams": "specinfer.sampling_params",
    "SpecInferError": "specinfer.errors",
    "SpeculationFigures": "specinfer.request",
    "SpeculationParams": "specinfer.sampling_params",
    "Speculator": "specinfer.speculate.speculator",
    "TokenTree": "specinfer.tree.token_tree",
    "UserError": "specinfer.errors",
}

__all__ = [
    "LLM",
    "EngineConfig",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "SpecInferError",
    "SpeculationFigures",
    "SpeculationParams",
    "Speculator",
    "TokenTree",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
