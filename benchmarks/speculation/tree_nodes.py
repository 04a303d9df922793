"""Measures trees of 8 to 128 nodes: tokens per step, time and memory.

    python -m benchmarks.speculation.tree_nodes --model TARGET --draft HEAD --draft POOL --dataset mt.jsonl

Each draft runs alone, greedily, with trees of a fixed shape, verified as a whole in every step whatever
its cost. Two rows precede them: without a draft, and with sizes by cost, an engine's default. The columns are

    nodes      mean number of verified nodes per step, without the root
    tokens     tokens per step
    step       milliseconds of a whole step, of all requests if several run together
    over none  tokens per second, relative to those without a draft, which are measured first
    KV cache   bytes of one request's tree, root included, in the caches of the target and its draft
    peak       growth of the process's memory while it answers (on Linux)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.study import REQUIRED, Study, ask, parser, questions_of, row, run, settings_of, total_figures
from specinfer import LLM, SamplingParams, SpeculationParams
from specinfer.heads.medusa import MedusaModel
from specinfer.runtime.kv_cache import KvCache
from specinfer.tree.expansion import Expansion

# Four levels each, as every head has four: 8, 16, 28, 64 and 128 nodes below a root.
SHAPES: Final = [*map(Expansion.parse, ("2,1,1,1", "4,1,1,1", "4,2,1,1", "4,3,2,1", "8,3,2,1"))]
MOST: Final = max(shape.num_nodes for shape in SHAPES)
BY_COST: Final = "by cost"
NONE: Final = "nothing"
PROCESS: Final = Path("/proc/self")
HEAD: Final = ("draft", "trees", "nodes", "tokens", "step, ms", "over none", "KV cache, MB", "peak, MB")


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        draft=REQUIRED,
        quantization="int8",
        dataset=REQUIRED,
        limit=12,
        max_tokens=64,
        batch_size=1,
    )
    args = options.parse_args()
    questions = questions_of(args.dataset, args.limit)
    study = Study("tree-nodes", args.out, settings_of(args))
    for number, draft in enumerate(("", *args.draft)):
        kinds: dict[str, Expansion | None] = {NONE: None}
        if draft:
            kinds = {BY_COST: None, **{str(shape): shape for shape in SHAPES}}
        names = {kind: f"{number}: {Path(draft).name}, {kind}" for kind in kinds}
        if all(name in study.cells for name in names.values()):
            continue
        with LLM(
            args.model,
            drafts=(draft,) if draft else (),
            quantization=args.quantization,
            draft_quantization=args.quantization if draft else "auto",
            lookup=False,
            max_nodes=MOST,
            max_batch_size=args.batch_size,
            max_step_tokens=max(512, MOST * args.batch_size),
            max_context=1024,
        ) as llm:
            for kind, shape in kinds.items():
                if names[kind] not in study.cells:
                    study.keep(names[kind], measure(llm, questions, args.max_tokens, shape))
                    print(f"{names[kind]}: {study.cells[names[kind]]}", flush=True)
    print(study.write(page(study.settings, study.cells)))


def measure(llm: LLM, questions: list[str], max_tokens: int, shape: Expansion | None) -> dict[str, Any]:
    """Answer all questions with trees of this shape, or of sizes by cost, after a few to warm up."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        speculation=SpeculationParams() if shape is None else SpeculationParams(expansion=shape),
    )
    ask(llm, questions[:2], params)
    before, earlier = forget_peak(), llm.statistics()
    began = time.perf_counter()
    outputs = ask(llm, questions, params)
    seconds = time.perf_counter() - began
    figures = total_figures(outputs)
    nodes = figures.drafted_tokens / max(1, figures.steps)
    return {
        "nodes": nodes,
        "tokens": figures.tokens_per_step,
        "step": 1e3 * seconds / llm.statistics().since(earlier).steps,
        "speed": sum(len(output.token_ids) for output in outputs) / seconds,
        "kv": (1 + nodes) * bytes_per_node(llm),
        "grows": peak() - before,
    }


def bytes_per_node(llm: LLM) -> int:
    """Return the bytes of a tree node in the caches of the target and all drafts; Medusa's heads have
    none.
    """
    drafts = [one for one in llm.models.drafts.values() if not isinstance(one, MedusaModel)]
    models = (llm.models.target, *drafts)
    return sum(
        KvCache.bytes_per_slot(m.config.num_layers, m.config.num_kv_heads, m.config.head_dim, m.dtype)
        for m in models
    )


def forget_peak() -> int:
    """Reset the peak of the process's memory, if possible; return the current bytes."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak bytes of the process's memory since the last reset; 0 if unknown."""
    with suppress(OSError):
        for line in (PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    plain = next((cell for name, cell in cells.items() if name.endswith(NONE)), None)
    return [
        f"# Trees of {SHAPES[0].num_nodes - 1} to {MOST - 1} nodes: {settings['model']}, "
        f"{settings['quantization']}",
        "",
        f"{settings['limit']} prompts, {settings['max_tokens']} tokens each, greedy, "
        f"{settings['batch_size']} at a time. A shape's nodes are all verified; by cost: as many as the "
        "engine finds worth it. KV cache: of one request's tree, its root included; peak: what memory grew "
        "by while answers were made.",
        "",
        row(*HEAD),
        "|" + "---|" * len(HEAD),
        *(row(*figures_of(name, cell, plain)) for name, cell in cells.items()),
    ]


def figures_of(name: str, cell: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    draft, _, kind = name.partition(": ")[2].partition(", ")
    return [
        draft or "none",
        kind,
        f"{cell['nodes']:.1f}",
        f"{cell['tokens']:.2f}",
        f"{cell['step']:.1f}",
        "" if plain is None else f"{cell['speed'] / plain['speed']:.2f}",
        f"{cell['kv'] / 1e6:.2f}",
        f"{cell['grows'] / 1e6:.0f}",
    ]


if __name__ == "__main__":
    run(main)
