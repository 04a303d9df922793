"""What does a tree cost a hybrid of attention and recurrent states?

Models have random weights and the shapes of published ones (random_hybrids.py); a plain one has attention in
every layer.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import sub
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast
from unittest.mock import patch

import tokenizers
import torch

from benchmarks.machines.random_hybrids import CONTEXT, SHAPES, TOY, write_random
from benchmarks.paper.lab import Lab
from benchmarks.paper.passes import BLOCK, profiled
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, table, without_speculation
from specinfer import LLM, EngineConfig, SamplingParams, SpeculationParams
from specinfer.check.doctor import pass_bytes, tree_pass
from specinfer.engine.hardware import use_threads
from specinfer.engine.models import Models
from specinfer.errors import UserError
from specinfer.kernels.choice import Kernels, choose_kernels, draft_kernels, streaming_kernels
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

ASKS: Final = "What does a tree cost a model with recurrent states?"
_ANSWERS: Final = "guesses"  # last word of a key, or a quantization for passes
_SHAPES: Final = {**SHAPES, "toy": TOY}
_CPU: Final = torch.device("cpu")
_NODES: Final = (1, 8, 16, 64)
_TEXT: Final = 64  # tokens before a tree, and of a prompt for an answer
_PASSES: Final = 15
_PROMPT, _CHUNK = 2000, 512
_TOKENS: Final = 96  # of an answer
_RIGHT, _SECOND = 0.7, 0.1
_GUESSED: Final = Expansion.parse("2,1,1,1")  # eight nodes


def keys(lab: Lab) -> Sequence[str]:
    names = lab.pick(full=[*SHAPES], quick=["Qwen3.5-0.8B"], toy=["toy"])
    kinds = lab.pick(full=["int4", "none", _ANSWERS], quick=["int4", _ANSWERS], toy=["int4", _ANSWERS])
    return [f"{name},{kind}" for name in names for kind in kinds]


def measure(lab: Lab, key: str) -> Figures:
    name, kind = key.split(",")
    lab.elsewhere("random weights")
    kernels, why = choose_kernels("native", _CPU)
    if kernels.library is None:
        raise UserError(f"native kernels are needed: {why}")
    torch.set_num_threads(use_threads(None, kernels))
    model, draft = _SHAPES[name]
    with TemporaryDirectory() as made:
        write_random(model, Path(made) / "model.gguf")
        if kind == _ANSWERS:
            write_random(draft, Path(made) / "draft.gguf")
            return _guesses(Path(made), kernels, lab.pick(full=3, quick=1, toy=1))
        write_random(replace(model, attends=range(model.layers)), Path(made) / "plain.gguf")
        return _passes(Path(made), cast(Quantization, kind), kernels, Bandwidth(kernels.library))


def _load(path: Path, kind: Quantization, kernels: Kernels) -> LanguageModel:
    file = open_model(path)
    fast = streaming_kernels(kernels, estimate_bytes(file, torch.bfloat16, kernels, kind))
    return load_model(
        file, dtype=torch.bfloat16, device=_CPU, kernels=fast, quantization=kind, cache=path.parent
    )


def _passes(folder: Path, kind: Quantization, kernels: Kernels, bandwidth: Bandwidth) -> dict[str, Any]:
    """Return the times of passes with trees, by their nodes, and of a prompt.

    `floor` is the time over that of the memory for one node, which is the matrices, keys and values, one
    read and one write of the states, at the bandwidth measured between passes. `plain` has no states.
    """
    models = {name: _load(folder / f"{name}.gguf", kind, kernels) for name in ("model", "plain")}
    found: dict[str, dict[str, float]] = {}
    for nodes in _NODES:
        cell = found[str(nodes)] = {}
        for name, (ms, floor) in {"model": ("ms", "floor"), "plain": ("plain", "plain_floor")}.items():
            call, taken, floors = tree_pass(models[name], _TEXT, nodes), list[float](), list[float]()
            call()
            size = pass_bytes(folder / f"{name}.gguf", models[name], kind, _TEXT)
            for _ in range(_PASSES):
                taken.append(seconds(call))
                floors.append(size / bandwidth.measure())
            cell[ms], cell[floor] = 1e3 * _fast(taken), _fast(taken) / _fast(floors)
            if name == "model":
                cell["recurrence"] = _fast([_recurrences(call, kernels) for _ in range(_PASSES)])
    return {"nodes": found, "prompt": _prompt(models["model"], kernels)}


def _recurrences(call: Callable[[], object], kernels: Kernels) -> float:
    """Return the milliseconds of a pass in recurrences."""
    with profiled(kernels) as stages:
        call()
    return stages["recurrences"] / 1e6


def _fast(times: Sequence[float]) -> float:
    """Return the time that a tenth of them are below."""
    return statistics.quantiles(times, n=10)[0]


def _prompt(model: LanguageModel, kernels: Kernels) -> dict[str, float]:
    """Return the seconds of a prompt, and those of its recurrences."""
    blocks = range(-(-_PROMPT // BLOCK))
    runner = ModelRunner(model, num_blocks=len(blocks), block_size=BLOCK)
    tokens = [n * n % 997 for n in range(_PROMPT)]
    with profiled(kernels) as stages:
        began = time.perf_counter()
        for first in range(0, _PROMPT, _CHUNK):
            runner.forward([chain_rows(tokens[first : first + _CHUNK], first, blocks, logits=True)])
        taken = time.perf_counter() - began
    return {"seconds": taken, "recurrences": stages["recurrences"] / 1e9}


class _Agreement:
    """Replaces the logits of a draft, so that it agrees with a text as often as recorded."""

    def __init__(self, draft: LanguageModel) -> None:
        self.text = [0]  # prompt and answer
        self._read = draft.read
        self._draft = draft
        draft.read = self.read  # type: ignore[method-assign]
        draft.first_logits = lambda count: None  # type: ignore[method-assign]

    def read(
        self, token_ids_T: torch.Tensor, context: PassContext, rows: torch.Tensor | None = None, **more: Any
    ) -> PassOutput:
        """See LanguageModel."""
        output = self._read(token_ids_T, context, rows, **more)
        logits_RV = output.logits_RV if output.logits_RV is not None else self._draft.logits(output.hidden_RD)
        positions = context.positions_T if rows is None else context.positions_T[rows]
        logits_RV = torch.full_like(logits_RV, -30.0)
        for number, position in enumerate(positions.tolist()):
            chance = random.Random(f"{self.text[0]} {position}").random()
            token = self.text[position + 1] if position + 1 < len(self.text) else 0
            first = token if chance < _RIGHT else token ^ 1
            second = token if _RIGHT <= chance < _RIGHT + _SECOND else token ^ 2
            logits_RV[number, first], logits_RV[number, second] = math.log(_RIGHT), math.log(_SECOND)
            logits_RV[number, token ^ 4] = math.log(1 - _RIGHT - _SECOND)
        return output._replace(logits_RV=logits_RV)


@contextmanager
def _engine(target: LanguageModel, draft: LanguageModel) -> Iterator[LLM]:
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
        TemporaryDirectory() as cache,
        patch.dict(os.environ, {"SPECINFER_CACHE": cache}),
        LLM.from_models(config, models) as llm,
    ):
        yield llm


def _asked(number: int) -> list[int]:
    return [(n * n + 31 * number) % 997 + 8 for n in range(_TEXT)]


def _guesses(folder: Path, kernels: Kernels, answers: int) -> dict[str, Any]:
    """Return the gains of a draft over steps without it, in turns: trees of eight nodes, and sized by cost.

    `control` is the gain of nothing, measured in the same way.
    """
    target = _load(folder / "model.gguf", "int4", kernels)
    draft = _load(folder / "draft.gguf", "int4", draft_kernels(kernels))
    agreement = _Agreement(draft)
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    fixed = replace(params, speculation=SpeculationParams(expansion=_GUESSED))
    times: dict[str, list[float]] = {way: [] for way in ("none", "fixed", "cost", "control")}
    same = True
    with ExitStack() as stack:
        drafted = stack.enter_context(_engine(target, draft))
        plain, control = (stack.enter_context(without_speculation(drafted)) for _ in range(2))
        engines = {"none": plain, "fixed": drafted, "cost": drafted, "control": control}
        for number in range(answers + 1):
            [expected] = plain.generate([_asked(number)], params)
            agreement.text = [*_asked(number), *expected.token_ids]
            for way in [*times][:: -1 if number % 2 else 1]:
                chosen = fixed if way == "fixed" else params
                answer, steps = _steps_of(engines[way], _asked(number), chosen)
                same &= answer == expected.token_ids
                if number:  # the first one warms up
                    times[way] += steps
    tokens = {way: answers * (_TOKENS - 1) / len(steps) for way, steps in times.items()}
    sums = {way: sum(steps) for way, steps in times.items()}  # steps by cost differ, so no time is theirs
    return {
        "ms": 1e3 * _fast(times["none"]),
        "fixed_tokens": tokens["fixed"],
        "fixed_gain": _fast(times["none"]) / _fast(times["fixed"]) * tokens["fixed"],
        "cost_tokens": tokens["cost"],
        "cost_gain": sums["none"] / sums["cost"],
        "control": sums["none"] / sums["control"],
        "same": same,
    }


def _steps_of(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Sequence[int], list[float]]:
    """Return an answer, and the seconds of its steps behind the first."""
    ends: list[float] = []
    [output] = llm.generate([prompt], params, on_output=lambda _: ends.append(time.perf_counter()))
    return output.token_ids, [*map(sub, ends[1:], ends)]


def page(cells: Cells) -> list[str]:
    rows, guessed = [], []
    for key, cell in _of_passes(cells).items():
        one, tree, prompt = cell["nodes"]["1"], cell["nodes"]["16"], cell["prompt"]
        share = prompt["seconds"] / (prompt["seconds"] - prompt["recurrences"])
        figures = one["floor"], *_over_one(cell), tree["recurrence"], share
        rows.append((*key.replace("none", "bfloat16").split(","), f"{one['ms']:.1f}", *shown(figures)))
    for name, cell in _of_guesses(cells).items():
        names = ("fixed_tokens", "fixed_gain", "cost_tokens", "cost_gain", "control")
        guessed.append((name, *shown(cell[one] for one in names), "same" if cell["same"] else "DIFFERENT"))
    return [
        f"Shapes of published models with random weights. A pass runs behind {_TEXT} tokens; its floor is "
        "the memory's time for one node. A plain model attends in every layer; a prompt has "
        f"{_PROMPT:,} tokens.",
        *table(
            "shape | weights | one node, ms | over its floor | 16 nodes over one | plain model "
            "| recurrences, ms | prompt over one without them",
            rows,
        ),
        f"Greedy answers in int4, one at a time. The draft is a smaller hybrid, right at {_RIGHT:.0%} of all "
        f"positions; its trees are {_GUESSED}, or sized by cost.",
        *table("shape | tokens per step | over none | by cost | over none | none over none | texts", guessed),
        f"{_said(cells)}.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    for number, (key, cell) in enumerate(_of_passes(cells, "int4").items()):
        nodes = [int(count) for count in cell["nodes"]]
        for kind, style in (("ms", "-"), ("plain", ":")):
            times = [at[kind] / cell["nodes"]["1"][kind] for at in cell["nodes"].values()]
            name = key.split(",")[0] + (", plain" if kind == "plain" else "")
            axes.plot(nodes, times, linestyle=style, marker="o", color=f"C{number}", label=name)
    axes.set(xlabel="nodes of a tree", ylabel="time of a pass over that of one node")
    axes.legend()


def verdict(cells: Cells) -> Verdict:
    return Verdict(_said(cells))


def _of_passes(cells: Cells, kind: str = "") -> dict[str, Figures]:
    return {key: cell for key, cell in cells.items() if "nodes" in cell and key.endswith(kind)}


def _of_guesses(cells: Cells) -> dict[str, Figures]:
    return {key.split(",")[0]: cell for key, cell in cells.items() if key.endswith(_ANSWERS)}


def _over_one(cell: Figures) -> tuple[float, float]:
    """Return the time of 16 nodes over that of one, of the hybrid and of the plain model."""
    one, tree = cell["nodes"]["1"], cell["nodes"]["16"]
    return tree["ms"] / one["ms"], tree["plain"] / one["plain"]


def _said(cells: Cells) -> str:
    found = [_over_one(cell) for cell in _of_passes(cells, "int4").values()]
    gains = [cell["cost_gain"] for cell in _of_guesses(cells).values()]
    ratios = [
        f"{min(of):.2f} to {max(of):.2f} times one node of {what}"
        for what, of in zip(("a hybrid", "a plain model"), zip(*found, strict=True), strict=False)
    ]
    said = [f"In int4 a tree of 16 nodes takes {', '.join(ratios)}"] if ratios else []
    if gains:
        noise = max(abs(cell["control"] - 1) for cell in _of_guesses(cells).values())
        said.append(
            f"Guesses sized by cost gain {min(gains):.2f} to {max(gains):.2f} times; two runs without "
            f"guesses differ by up to {noise:.0%}"
        )
    return ". ".join(said)
