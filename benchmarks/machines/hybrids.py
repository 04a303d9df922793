"""Measures hybrids of attention and recurrent states with random weights: passes, prompts and guesses.

Shapes are those of published models (random_hybrids.py); a plain one has attention in every layer.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import tokenizers
import torch

from benchmarks.machines.random_hybrids import CONTEXT, Shape, write_random
from benchmarks.paper.passes import profiled
from benchmarks.study import without_speculation
from specinfer import LLM, EngineConfig, SamplingParams, SpeculationParams
from specinfer.check.doctor import pass_bytes, tree_pass
from specinfer.engine.models import Models
from specinfer.kernels.choice import Kernels, draft_kernels, streaming_kernels
from specinfer.kernels.disk import Bandwidth, seconds
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import load_model
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer
from specinfer.tree.token_tree import Expansion

CPU: Final = torch.device("cpu")
NODES: Final = (1, 8, 16, 64)
TEXT: Final = 64  # tokens before a tree, and of a prompt for an answer
PASSES: Final = 15
PROMPT, CHUNK, BLOCK = 2000, 512, 16
TOKENS: Final = 96  # of an answer
RIGHT, SECOND = 0.7, 0.1
GUESSED: Final = Expansion.parse("2,1,1,1")  # eight nodes


def write_models(folder: Path, **shapes: Shape) -> None:
    """Write a file for each name: `model`, and `plain` for passes or `draft` for guesses."""
    for name, shape in shapes.items():
        write_random(shape, folder / f"{name}.gguf")


def load(path: Path, kind: Quantization, kernels: Kernels) -> LanguageModel:
    file = open_model(path)
    fast = streaming_kernels(kernels, estimate_bytes(file, torch.bfloat16, kernels, kind))
    return load_model(
        file, dtype=torch.bfloat16, device=CPU, kernels=fast, quantization=kind, cache=path.parent
    )


# ---- passes ----


def passes(folder: Path, kind: Quantization, kernels: Kernels, bandwidth: Bandwidth) -> dict[str, Any]:
    """Return the times of passes with trees, by their nodes, and of a prompt.

    `floor` is the time over that of the memory for one node, which is the matrices, keys and values, one
    read and one write of the states, at the bandwidth measured between passes. `plain` has no states.
    """
    models = {name: load(folder / f"{name}.gguf", kind, kernels) for name in ("model", "plain")}
    found: dict[str, dict[str, float]] = {}
    for nodes in NODES:
        cell = found[str(nodes)] = {}
        for name, (ms, floor) in {"model": ("ms", "floor"), "plain": ("plain", "plain_floor")}.items():
            call, taken, floors = tree_pass(models[name], TEXT, nodes), list[float](), list[float]()
            call()
            size = pass_bytes(folder / f"{name}.gguf", models[name], kind, TEXT)
            for _ in range(PASSES):
                taken.append(seconds(call))
                floors.append(size / bandwidth.measure())
            cell[ms], cell[floor] = 1e3 * fast(taken), fast(taken) / fast(floors)
            if name == "model":
                cell["recurrence"] = fast([recurrences(call, kernels) for _ in range(PASSES)])
    return {"nodes": found, "prompt": prompt(models["model"], kernels)}


def recurrences(call: Callable[[], object], kernels: Kernels) -> float:
    """Return the milliseconds of a pass in recurrences."""
    with profiled(kernels) as stages:
        call()
    return stages["recurrences"] / 1e6


def fast(times: Sequence[float]) -> float:
    """Return the time that a tenth of them are below."""
    return statistics.quantiles(times, n=10)[0]


def prompt(model: LanguageModel, kernels: Kernels) -> dict[str, float]:
    """Return the seconds of a prompt, and those of its recurrences."""
    blocks = range(-(-PROMPT // BLOCK))
    runner = ModelRunner(model, num_blocks=len(blocks), block_size=BLOCK)
    tokens = [n * n % 997 for n in range(PROMPT)]
    with profiled(kernels) as stages:
        began = time.perf_counter()
        for first in range(0, PROMPT, CHUNK):
            runner.forward([chain_rows(tokens[first : first + CHUNK], first, blocks, logits=True)])
        taken = time.perf_counter() - began
    return {"seconds": taken, "recurrences": stages["recurrences"] / 1e9}


# ---- texts ----


class Agreement:
    """Replaces the logits of a draft, so that it agrees with a text as often as recorded."""

    def __init__(self, draft: LanguageModel) -> None:
        self.text = [0]  # prompt and answer
        self._read = draft.read
        self._draft = draft
        draft.read = self.read  # type: ignore[method-assign]

    def read(
        self,
        token_ids_T: torch.Tensor,
        context: PassContext,
        rows: torch.Tensor | None = None,
        **more: Any,
    ) -> PassOutput:
        """See LanguageModel."""
        output = self._read(token_ids_T, context, rows, **more)
        logits_RV = output.logits_RV if output.logits_RV is not None else self._draft.logits(output.hidden_RD)
        positions = context.positions_T if rows is None else context.positions_T[rows]
        logits_RV = logits_RV.clone()
        logits_RV.fill_(-30.0)
        for number, position in enumerate(positions.tolist()):
            chance = random.Random(f"{self.text[0]} {position}").random()
            token = self.text[position + 1] if position + 1 < len(self.text) else 0
            wrong = [token ^ 1, token ^ 2]
            first = token if chance < RIGHT else wrong[0]
            second = token if RIGHT <= chance < RIGHT + SECOND else wrong[1]
            logits_RV[number, first], logits_RV[number, second] = math.log(RIGHT), math.log(SECOND)
            logits_RV[number, token ^ 4] = math.log(1 - RIGHT - SECOND)
        return output._replace(logits_RV=logits_RV)


@contextmanager
def engine(target: LanguageModel, draft: LanguageModel) -> Iterator[LLM]:
    """An engine over these models in int4, which keeps its policy's state in a new folder."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}))
    backend.decoder = tokenizers.decoders.ByteLevel()
    config = EngineConfig.from_options(
        "random",
        {
            **{"device": "cpu", "kernels": "native", "quantization": "int4", "draft_quantization": "int4"},
            **{"drafts": ("draft",), "lookup": False, "max_batch_size": 1, "prefix_reuse": False},
            **{"max_context": CONTEXT, "kv_cache_memory": 1 << 29},
        },
    )
    tokenizer = Tokenizer(backend, eos_token_ids=())
    models = Models(target, tokenizer, {"draft": draft}, quantization="int4", kinds={"draft": "int4"})
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"SPECINFER_CACHE": cache}),
        LLM.from_models(config, models) as llm,
    ):
        yield llm


def asked(number: int) -> list[int]:
    return [(n * n + 31 * number) % 997 + 8 for n in range(TEXT)]


def guesses(folder: Path, kernels: Kernels, answers: int) -> dict[str, Any]:
    """Return the gains of a draft over steps without it, in turns: trees of eight nodes, and sized by cost.

    `control` is the gain of nothing, measured in the same way.
    """
    target = load(folder / "model.gguf", "int4", kernels)
    draft = load(folder / "draft.gguf", "int4", draft_kernels(kernels))
    agreement = Agreement(draft)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    fixed = replace(params, speculation=SpeculationParams(expansion=GUESSED))
    times: dict[str, list[float]] = {way: [] for way in ("none", "fixed", "cost", "control")}
    same = True
    with ExitStack() as stack:
        drafted = stack.enter_context(engine(target, draft))
        plain, control = (stack.enter_context(without_speculation(drafted)) for _ in range(2))
        engines = {"none": plain, "fixed": drafted, "cost": drafted, "control": control}
        for number in range(answers + 1):
            [expected] = plain.generate([asked(number)], params)
            agreement.text = [*asked(number), *expected.token_ids]
            for way in [*times][:: -1 if number % 2 else 1]:
                chosen = fixed if way == "fixed" else params
                answer, steps = steps_of(engines[way], asked(number), chosen)
                same &= answer == expected.token_ids
                if number:  # the first one warms up
                    times[way] += steps
    tokens = {way: answers * (TOKENS - 1) / len(steps) for way, steps in times.items()}
    sums = {way: sum(steps) for way, steps in times.items()}  # steps by cost differ, so no time is theirs
    return {
        "ms": 1e3 * fast(times["none"]),
        "fixed_tokens": tokens["fixed"],
        "fixed_gain": fast(times["none"]) / fast(times["fixed"]) * tokens["fixed"],
        "cost_tokens": tokens["cost"],
        "cost_gain": sums["none"] / sums["cost"],
        "control": sums["none"] / sums["control"],
        "same": same,
    }


def steps_of(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Sequence[int], list[float]]:
    """Return an answer, and the seconds of its steps behind the first."""
    ends: list[float] = []
    [output] = llm.generate([prompt], params, on_output=lambda _: ends.append(time.perf_counter()))
    return output.token_ids, [*map(sub, ends[1:], ends)]
