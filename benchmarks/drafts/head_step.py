"""Measures the microseconds of a step that a block head takes, beside the target's pass.

    python -m benchmarks.drafts.head_step --model TARGET --draft HEAD --dataset mt_bench.jsonl

One greedy request runs at a time, with the head in int8 and unquantized. Steps are an engine's own, so the
target's pass has emptied the caches before the head starts. Medians of all steps without a prompt:

    native     the two native calls: reading with the pass, then the trees
    head       the head's share: opening the step, reading, its pass, the trees
    propose    all work before the target's pass: the head, the policy and merging
    states     storing hidden states for the head after the pass
    weights    the lower bound: the bytes of the head's matrices divided by the memory bandwidth
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.study import REQUIRED, Study, ask, parser, questions_of, row, run, settings_of, total_figures
from specinfer import LLM, SamplingParams
from specinfer.heads.block import BlockModel
from specinfer.heads.kinds import head_shapes
from specinfer.heads.runner import HeadRunner
from specinfer.kernels.bandwidth import Bandwidth
from specinfer.kernels.layout import int8_bytes
from specinfer.kernels.native import load_library
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculation_config import Quantization

KINDS: tuple[Quantization, ...] = ("int8", "none")
SIZES = ("fixed", "cost")
COLUMNS = ("read and pass", "trees", "native", "head", "propose", "states", "target")


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        draft=REQUIRED,
        quantization="int8",
        dataset=REQUIRED,
        limit=8,
        max_tokens=64,
    )
    args = options.parse_args()
    questions = questions_of(args.dataset, args.limit)
    study = Study("head-step", args.out, settings_of(args))
    for kind in KINDS:
        for size in SIZES:
            name = f"{kind}, {size}"
            if name in study.cells:
                continue
            with LLM(
                args.model,
                drafts=tuple(args.draft),
                quantization=args.quantization,
                draft_quantization=kind,
                tree_size=size,
                lookup=False,
                max_batch_size=1,
            ) as llm:
                study.keep(name, measure(llm, kind, questions, args.max_tokens))
    print(study.write(page(study.settings, study.cells)))


class Watch:
    """Seconds of each call, by part and step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = [{}]
        self._undone: list[Callable[[], None]] = []

    def watch(self, part: str, of: Any, name: str, *, ends: bool = False) -> None:
        """Time a method of a class or object; each return from one with `ends` ends a step."""
        call = getattr(of, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            answer = call(*args, **options)
            step = self.steps[-1]
            step[part] = step.get(part, 0.0) + time.perf_counter() - began
            if ends:
                self.steps.append({})
            return answer

        setattr(of, name, timed)
        self._undone.append(lambda: setattr(of, name, call))

    def see(self, seen: list[Any], of: type, name: str) -> None:
        """Record the first object whose method is called."""
        call = getattr(of, name)

        def noted(one: Any, *args: Any) -> Any:
            if not seen:
                seen.append(one)
            return call(one, *args)

        setattr(of, name, noted)
        self._undone.append(lambda: setattr(of, name, call))

    def stop(self) -> None:
        """Restore all methods."""
        for undo in self._undone:
            undo()


def measure(llm: LLM, kind: Quantization, questions: list[str], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    ask(llm, questions[:2], params)
    watch, library = Watch(), load_library()
    heads: list[HeadRunner[BlockModel]] = []
    watch.see(heads, HeadRunner, "guess")
    for part, of, name in (
        ("read and pass", library, "step_blocks"),
        ("trees", library, "grow_trees"),
        ("begin", BlockDraft, "begin"),
        ("deepen", BlockDraft, "deepen"),
        ("tree", BlockDraft, "tree"),
        ("propose", Ensemble, "propose"),
        ("states", Ensemble, "receive_states"),
        ("target", ModelRunner, "launch"),
    ):
        watch.watch(part, of, name)
    watch.watch("observe", Ensemble, "observe", ends=True)
    try:
        outputs = ask(llm, questions, params)
    finally:
        watch.stop()
    steps = [step for step in watch.steps if "trees" in step]  # steps without prompts
    for step in steps:
        step["native"] = step.get("read and pass", 0.0) + step["trees"]
        step["head"] = sum(step.get(part, 0.0) for part in ("begin", "deepen", "tree"))
    size = matrix_bytes(heads[0].model, kind)
    return {
        "steps": len(steps),
        "tokens_per_step": total_figures(outputs).tokens_per_step,
        "microseconds": {part: 1e6 * statistics.median(step[part] for step in steps) for part in COLUMNS},
        "megabytes": size / 1e6,
        "weights": 1e6 * size / Bandwidth(library).median(),
    }


def matrix_bytes(model: BlockModel, kind: Quantization) -> int:
    """Return the bytes of all matrices that a step reads; tables are read by row."""
    shapes = {name: shape for name, shape in head_shapes(model.head).items() if len(shape) == 2}
    shapes["lm_head.weight"] = (model.head.draft_vocab_size, model.config.hidden_size)
    both = [name for name in shapes if name.endswith(("k_proj.weight", "v_proj.weight"))]
    looked_up = ("embed_tokens.weight", "markov_w1.weight", ".vector")
    read = [name for name in shapes if not name.endswith(looked_up)]
    sizes = [shapes[name] for name in (*read, *both)]  # rows of the text, and of the block
    if kind == "int8":
        return sum(int8_bytes(*size) for size in sizes)
    return sum(rows * columns * model.dtype.itemsize for rows, columns in sizes)


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    return [
        f"# What a block head takes of a step: {settings['model']}, {settings['quantization']}",
        "",
        f"Microseconds, medians of steps; {settings['limit']} prompts, {settings['max_tokens']} tokens.",
        "",
        row("head, trees", "steps", "tokens per step", *COLUMNS, "weights", "MB of them"),
        "|" + "---|" * (len(COLUMNS) + 5),
        *(row_of(name, cell) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    spent = [f"{cell['microseconds'][part]:.0f}" for part in COLUMNS]
    tokens = f"{cell['tokens_per_step']:.2f}"
    return row(name, cell["steps"], tokens, *spent, f"{cell['weights']:.0f}", f"{cell['megabytes']:.1f}")


if __name__ == "__main__":
    run(main)
