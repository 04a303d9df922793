"""specinfer: tree-based speculative inference for large language models."""

from typing import TYPE_CHECKING, Any

from specinfer.version import VERSION as __version__

if TYPE_CHECKING:
    from specinfer.config import EngineConfig as EngineConfig
    from specinfer.errors import SpecInferError as SpecInferError
    from specinfer.errors import UserError as UserError
    from specinfer.llm import LLM as LLM
    from specinfer.request import FinishReason as FinishReason
    from specinfer.request import LoRARequest as LoRARequest
    from specinfer.request import RequestOutput as RequestOutput
    from specinfer.request import SpeculationFigures as SpeculationFigures
    from specinfer.sampling_params import SamplingParams as SamplingParams
    from specinfer.sampling_params import SpeculationParams as SpeculationParams
    from specinfer.speculate.speculator import Speculator as Speculator
    from specinfer.tree.token_tree import TokenTree as TokenTree

# Imported on first access, so that `specinfer --help` does not load torch.
_HOMES = {
    "EngineConfig": "specinfer.config",
    "FinishReason": "specinfer.request",
    "LLM": "specinfer.llm",
    "LoRARequest": "specinfer.request",
    "RequestOutput": "specinfer.request",
    "SamplingParams": "specinfer.sampling_params",
    "SpecInferError": "specinfer.errors",
    "SpeculationFigures": "specinfer.request",
    "SpeculationParams": "specinfer.sampling_params",
    "Speculator": "specinfer.speculate.speculator",
    "TokenTree": "specinfer.tree.token_tree",
    "UserError": "specinfer.errors",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
