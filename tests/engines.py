"""Tiny models in engines, and a slow plain generator to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.config import EngineConfig
from specinfer.engine.engine import Engine
from specinfer.engine.models import Models
from specinfer.kernels.choice import Kernels, choose_kernels, draft_kernels
from specinfer.llm import LLM
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import load_model
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner, as_rows
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.target_law import target_law

from .tiny_models import write_similar_llama, write_tiny_llama

CPU = torch.device("cpu")
# Trees of a fixed size, since a tiny draft costs as much as a tiny target and timings vary. No default
# speculators.
ENGINE = {"dtype": "float32", "kv_cache_memory": 1 << 24, "tree_size": "fixed", "lookup": False}


@dataclass(frozen=True)
class Tiny:
    """A tiny target, a draft that often agrees with it, and an unrelated one."""

    target: LanguageModel
    similar: LanguageModel
    stranger: LanguageModel
    tokenizer: Tokenizer

    def llm(self, drafts: Sequence[str] = (), **options: Any) -> LLM:
        """Return an engine over these models; `drafts` names attributes, 'target' drafts for itself."""
        named = {f"{i}-{name}": getattr(self, name) for i, name in enumerate(drafts)}
        config = EngineConfig.from_options("tiny", {**ENGINE, "drafts": tuple(drafts), **options})
        return LLM.from_models(config, Models(self.target, self.tokenizer, named))


def write_tiny(
    folder: Path, kernels: Kernels | None = None, quantization: Quantization = "none", **shape: Any
) -> Tiny:
    """Write the models with the same quantization and with the kernels of an engine.

    The default `kernels` are the machine's best: with PyTorch, tiny passes take ten times as long.
    """
    kernels = kernels or choose_kernels("auto", CPU)[0]
    target = write_tiny_llama(folder / "target", tokenizer=True, **shape)
    similar = write_similar_llama(target, folder / "similar", noise=0.1)
    stranger = write_tiny_llama(folder / "stranger", tokenizer=True, **{**shape, "seed": 99})
    models = (
        load_model(
            path,
            dtype=torch.float32,
            device=CPU,
            kernels=kernels if path == target else draft_kernels(kernels),
            quantization=quantization,
            cache=folder / "quantized",
        )
        for path in (target, similar, stranger)
    )
    return Tiny(*models, tokenizer=Tokenizer.load(target))


def tiny_of(*kernels: Kernels, **shape: Any) -> Any:
    """Return a fixture of a module: tiny models of this shape."""

    @pytest.fixture(scope="module")
    def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
        return write_tiny(tmp_path_factory.mktemp("tiny"), *kernels, **shape)

    return tiny


def slow_generate(
    model: LanguageModel, prompt: Sequence[int], params: SamplingParams, ending: Sequence[int] = ()
) -> list[int]:
    """Generate one token at a time and rerun the whole text for each: no cache, no tree, no batch."""
    assert params.seed is not None or params.greedy
    text = list(prompt)
    max_context = model.config.max_context
    while len(text) - len(prompt) < params.max_tokens and len(text) < max_context:
        runner = ModelRunner(model, num_blocks=1, block_size=max_context)
        logits = as_rows(runner.forward([chain_rows(text, 0, [0], logits=True)]))[0].copy()
        if len(text) - len(prompt) < params.min_tokens:
            logits[list(ending)] = -np.inf
        if params.greedy:
            token = int(logits.argmax())
        else:
            token = coupled_choice(target_law(logits, params), params.seed, len(text))
        text.append(token)
        if token in ending:
            break
    return text[len(prompt) :]


def assert_idle(llm: LLM) -> None:
    """Assert that the bookkeeping is right and no request is left."""
    llm.check_integrity()
    statistics = llm.statistics()
    assert (statistics.running, statistics.waiting) == (0, 0)


def engine_of(llm: LLM) -> Engine:
    """Return the engine, for tests of its internals."""
    return llm._open.engine


def runner_of(llm: LLM) -> ModelRunner:
    """Return the target's runner, with its cache."""
    return engine_of(llm)._executor.target
