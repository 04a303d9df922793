"""Measures hybrids of attention and recurrent states: passes, prompts, guesses, and llama.cpp beside ours.

    make peers-env ARGS=llama_cpp                        once, for the last table
    python -m benchmarks.machines.hybrids --folder FILES

Shapes are those of published models, weights are random (random_hybrids.py); their files stay in the folder.

    fast        of repeated times the one that a tenth of them are below, as other programs may run
    floor       matrices, keys and values of a pass, and one read and one write of the states, over the
                bandwidth measured between passes, of which the one that a tenth are above
    plain       the same sizes with attention in every layer
    recurrence  what recurrent layers take beside their products, by the kernels' own profile
    guesses     from a smaller hybrid, whose logits are replaced: its first choice is the target's token for
                `RIGHT` of all positions, its second for `SECOND`. So texts and costs are those of a pair that
                agrees as often
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import tokenizers
import torch

from benchmarks.machines.kernels import profiled
from benchmarks.machines.random_hybrids import CONTEXT, SHAPES, write_random
from benchmarks.peers.engines import default_home, script_of
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.study import Study, parser, row, run, settings_of, without_speculation
from specinfer import LLM, EngineConfig, SamplingParams, SpeculationParams
from specinfer.check.doctor import pass_bytes, tree_pass
from specinfer.engine.hardware import use_threads
from specinfer.engine.models import Models
from specinfer.kernels.choice import Kernels, choose_kernels, draft_kernels, streaming_kernels
from specinfer.kernels.disk import Bandwidth, seconds
from specinfer.kernels.machine import thread_count
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import load_model
from specinfer.plan import StateCounts
from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.runtime.state_cache import state_bytes
from specinfer.speculation_config import Quantization
from specinfer.tokenizer import Tokenizer
from specinfer.tree.token_tree import Expansion

CPU: Final = torch.device("cpu")
KINDS: Final[tuple[Quantization, ...]] = ("int4", "none")
NODES: Final = (1, 8, 16, 64)
TEXT: Final = 64  # tokens before a tree, and of a prompt for an answer
PASSES: Final = 15
PROMPT, CHUNK, BLOCK = 2000, 512, 16
ANSWERS, TOKENS = 3, 96
RIGHT, SECOND = 0.7, 0.1
GUESSED: Final = Expansion.parse("2,1,1,1")  # eight nodes
ROUNDS: Final = 2  # beside llama.cpp


def main() -> None:
    options = parser(__doc__, threads=thread_count())
    options.add_argument("--folder", type=Path, required=True, help="for files of random models, 7 GB")
    options.add_argument("--shape", action="append", choices=[*SHAPES], help="repeatable (default: all)")
    args = options.parse_args()
    study = Study("hybrids", args.out, {"model": "shapes", **settings_of(args, without=("folder", "shape"))})
    kernels, why = choose_kernels("native", CPU)
    if kernels.library is None:
        sys.exit(f"error: native kernels are needed, and there are none: {why}")
    torch.set_num_threads(use_threads(args.threads, kernels))
    bandwidth = Bandwidth(kernels.library)
    shapes = args.shape or [*SHAPES]
    for name in shapes:
        write_models(name, args.folder)
    questions: dict[str, Callable[[], dict[str, Any]]] = {
        f"{name}|{kind}": partial(passes, args.folder, name, kind, kernels, bandwidth)
        for kind in KINDS
        for name in shapes
    }
    questions |= {f"{name}|peer": partial(beside_llama_cpp, args, name, kernels) for name in shapes}
    questions |= {f"{name}|guesses": partial(guesses, args, name, kernels) for name in shapes}
    for cell, measure in questions.items():
        if cell not in study.cells:
            study.keep(cell, measure())
            print(cell, study.cells[cell], flush=True)
    print(study.write(page(study.cells), args.threads))


def write_models(name: str, folder: Path) -> None:
    """Write the files of a shape that are missing: the model, a plain one, and a draft."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, draft = SHAPES[name]
    for what, own in {"": shape, "-plain": shape.plain, "-draft": draft}.items():
        path = folder / f"{name}{what}.gguf"
        if not path.exists():
            write_random(own, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)


def load(path: Path, kind: Quantization, kernels: Kernels) -> LanguageModel:
    file = open_model(path)
    fast = streaming_kernels(kernels, estimate_bytes(file, torch.bfloat16, kernels, kind))
    return load_model(
        file, dtype=torch.bfloat16, device=CPU, kernels=fast, quantization=kind, cache=path.parent
    )


# ---- passes ----


def passes(
    folder: Path, name: str, kind: Quantization, kernels: Kernels, bandwidth: Bandwidth
) -> dict[str, Any]:
    """Return the times of passes with trees, and of a prompt."""
    paths = {what: folder / f"{name}{what}.gguf" for what in ("", "-plain")}
    models = {what: load(path, kind, kernels) for what, path in paths.items()}
    found: dict[str, Any] = {}
    for nodes in NODES:
        cell: dict[str, float] = {}
        for what, model in models.items():
            call = tree_pass(model, TEXT, nodes)
            call()
            size, taken, floors = pass_bytes(paths[what], model, kind, TEXT), list[float](), list[float]()
            for _ in range(PASSES):
                taken.append(seconds(call))
                floors.append(size / bandwidth.measure())
            cell[f"ms{what}"] = 1e3 * fast(taken)
            cell[f"times{what}"] = fast(taken) / fast(floors)
            if not what:
                cell["recurrence"] = fast([recurrences(call, kernels) for _ in range(PASSES)])
        found[str(nodes)] = cell
    config = models[""].config
    recurrence, layers = config.recurrence, len(config.recurrent_layers)
    assert recurrence is not None
    return {
        "nodes": found,
        "state": state_bytes([(config, model.dtype)], StateCounts(0, 1)),
        "input": 4 * layers * recurrence.input_floats,
        "prompt": prompt(models[""], kernels),
    }


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
def engine(
    args: argparse.Namespace, target: LanguageModel, drafts: dict[str, Any], kind: Quantization
) -> Iterator[LLM]:
    """An engine over these models, which keeps its policy's state in a new folder."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}))
    backend.decoder = tokenizers.decoders.ByteLevel()
    config = EngineConfig.from_options(
        "random",
        {
            **{"device": "cpu", "kernels": "native", "quantization": kind, "draft_quantization": "int4"},
            **{"drafts": tuple(drafts), "lookup": False, "max_batch_size": 1, "prefix_reuse": False},
            **{"max_context": CONTEXT, "kv_cache_memory": 1 << 29, "threads": args.threads},
        },
    )
    tokenizer = Tokenizer(backend, eos_token_ids=())
    models = Models(target, tokenizer, drafts, quantization=kind, kinds=dict.fromkeys(drafts, "int4"))
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.dict(os.environ, {"SPECINFER_CACHE": cache}),
        LLM.from_models(config, models) as llm,
    ):
        yield llm


def asked(number: int) -> list[int]:
    return [(n * n + 31 * number) % 997 + 8 for n in range(TEXT)]


def guesses(args: argparse.Namespace, name: str, kernels: Kernels) -> dict[str, Any]:
    """Return tokens per second without guesses and with them, in turns."""
    target = load(args.folder / f"{name}.gguf", "int4", kernels)
    draft = load(args.folder / f"{name}-draft.gguf", "int4", draft_kernels(kernels))
    agreement = Agreement(draft)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    fixed = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, speculation=SpeculationParams(expansion=GUESSED)
    )
    times: dict[str, list[float]] = {way: [] for way in ("none", "eight nodes", "by cost", "control")}
    same = True
    with ExitStack() as stack:
        drafted = stack.enter_context(engine(args, target, {"draft": draft}, "int4"))
        plain, control = (stack.enter_context(without_speculation(drafted)) for _ in range(2))
        engines = {"none": plain, "eight nodes": drafted, "by cost": drafted, "control": control}
        for number in range(ANSWERS + 1):
            [expected] = plain.generate([asked(number)], params)
            agreement.text = [*asked(number), *expected.token_ids]
            for way in [*times][:: -1 if number % 2 else 1]:
                chosen = fixed if way == "eight nodes" else params
                answer, steps = steps_of(engines[way], asked(number), chosen)
                same &= answer == expected.token_ids
                if number:  # the first one warms up
                    times[way] += steps
    return {"times": times, "same": same}


def steps_of(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[Sequence[int], list[float]]:
    """Return an answer, and the seconds of its steps behind the first."""
    ends: list[float] = []
    [output] = llm.generate([prompt], params, on_output=lambda _: ends.append(time.perf_counter()))
    return output.token_ids, [*map(sub, ends[1:], ends)]


def beside_llama_cpp(args: argparse.Namespace, name: str, kernels: Kernels) -> dict[str, Any]:
    """Return tokens per second of plain decoding, of the same file, in turns."""
    path, times = args.folder / f"{name}.gguf", dict[str, list[float]]()
    python = default_home() / "llama_cpp" / "bin" / "python"
    setup = {"model": str(path), "draft": None, "threads": args.threads, "context": CONTEXT, "options": {}}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    try:
        with Worker([str(python), *script_of("llama_cpp")], {}, 600) as worker, ExitStack() as stack:
            versions = worker.ask(setup)["versions"]
            for kind in ("gguf", "int4"):
                target = load(path, kind, kernels)
                llm = stack.enter_context(engine(args, target, {}, kind))
                for number in range(ROUNDS + 1):
                    reply = worker.ask({"prompt": asked(number), "max_tokens": TOKENS})
                    _, ours = steps_of(llm, asked(number), params)
                    ends = [end for end, _ in reply["arrivals"]]
                    if number:
                        times.setdefault(kind, []).extend(ours)
                        times.setdefault("llama.cpp", []).extend(map(sub, ends[1:], ends))
    except WorkerError as error:
        sys.exit(f"error: llama.cpp: {error}; make peers-env ARGS=llama_cpp installs it")
    return {"times": times, "versions": versions}


# ---- the page ----


def page(cells: dict[str, Any]) -> list[str]:
    lines = [
        "# Hybrids: passes by their nodes, prompts, guesses",
        "",
        "Shapes of published models with **random weights**: texts mean nothing. Activations in bfloat16.",
        *("", "## A pass", ""),
        f"{PASSES} passes behind {TEXT} tokens, logits of all nodes. A tree has two children a node. The "
        "floor is that of one node. Of repeated times here and below the one counts that a tenth are below.",
        *heading(
            *("shape", "weights", "nodes", "ms", "over one", "over the floor", "recurrence, ms"),
            *("states and inputs written, MiB", "plain, ms", "plain, over one", "plain, over the floor"),
        ),
    ]
    measured = {name: cells[name] for name in sorted(cells, key=_order) if "nodes" in cells[name]}
    for name, cell in measured.items():
        one = cell["nodes"]["1"]
        for nodes, at in cell["nodes"].items():
            written = (cell["state"] + (int(nodes) - 1) * cell["input"]) / 2**20
            shown = (at["ms"], at["ms"] / one["ms"], at["times"], at["recurrence"], written)
            plain = (at["ms-plain"], at["ms-plain"] / one["ms-plain"], at["times-plain"])
            lines.append(row(*name.split("|"), nodes, *(f"{figure:.2f}" for figure in shown + plain)))
    lines += ["", f"## A prompt of {PROMPT} tokens"]
    lines += heading("shape", "weights", "s", "of recurrences", "over the same without them")
    for name, cell in measured.items():
        whole, part = cell["prompt"]["seconds"], cell["prompt"]["recurrences"]
        lines.append(row(*name.split("|"), f"{whole:.1f}", f"{part:.2f}", f"{whole / (whole - part):.3f}"))
    lines += [
        *("", "## Guesses", ""),
        f"int4, {ANSWERS} answers of {TOKENS} tokens, greedy, batch 1, in turns. The draft is a smaller "
        f"hybrid; its first choice is right at {RIGHT:.0%} of all positions, its second at {SECOND:.0%}. "
        f"Eight nodes: always a tree of {GUESSED}. By cost: as the policy chooses, with means of its steps.",
        *heading(
            *("shape", "ms without", "control, over it", "eight nodes: ms", "tokens a step", "over none"),
            *("by cost: tokens a step", "over none", "control", "texts equal"),
        ),
    ]
    for name in sorted(cells, key=_order):
        cell = cells[name]
        if name.endswith("|guesses"):
            times = cell["times"]
            made = {way: ANSWERS * (TOKENS - 1) / len(times[way]) for way in times}
            none, control, eight = (fast(times[way]) for way in ("none", "control", "eight nodes"))
            means = {way: sum(times[way]) for way in times}
            said = [1e3 * none, none / control, 1e3 * eight, made["eight nodes"]]
            said += none / eight * made["eight nodes"], made["by cost"], means["none"] / means["by cost"]
            said += (means["none"] / means["control"],)
            same = "yes" if cell["same"] else "NO"
            lines.append(row(name.split("|")[0], *(f"{figure:.2f}" for figure in said), same))
    lines += [
        *("", "## llama.cpp", ""),
        f"Plain decoding behind {TEXT} tokens, the same file of Q4_0 blocks, in turns; tokens/s.",
        *heading("shape", "llama.cpp", "ours, the file's blocks", "times", "ours, int4", "times"),
    ]
    for name in sorted(cells, key=_order):
        cell = cells[name]
        if name.endswith("|peer"):
            theirs, *ours = (1 / fast(cell["times"][which]) for which in ("llama.cpp", "gguf", "int4"))
            pairs = (figure for one in ours for figure in (f"{one:.1f}", f"{one / theirs:.2f}"))
            lines.append(row(name.split("|")[0], f"{theirs:.1f}", *pairs))
    return lines


def _order(name: str) -> int:
    """Return the place of a cell's shape."""
    return [*SHAPES].index(name.split("|")[0])


def heading(*names: str) -> list[str]:
    """Return the first lines of a table."""
    return ["", row(*names), row(*["---"] * len(names))]


if __name__ == "__main__":
    run(main)
