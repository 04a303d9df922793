"""Compares specinfer with other engines: the same weights, prompts and lengths, one engine at a time.

    make peers-env                                   once: the others, each in its own environment
    python -m benchmarks.peers.peers --model TARGET.gguf --draft SSM.gguf --prompts alpaca.jsonl code.jsonl \\
        --out RESULT.md
    ... --engines 'specinfer-file*,llama-server*,ik_llama*,openvino*'       those that take the file as it is

Every engine is a child process (run_engines.py) that runs for one round, so that none spins or holds memory
while another is measured. A missing or failing engine is a row with its reason. A JSON file beside the
Markdown keeps every finished (engine, round): an interrupted run continues, and failed ones run again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.peers.engines import ENGINES, OURS, Engine, Home, default_home, select
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.study import Study, digest, in_turn, natural, parser, prompt_ids, run, spread, table
from specinfer.errors import UserError
from specinfer.hub import resolve
from specinfer.kernels.machine import thread_count
from specinfer.report.dataset import built_in, read_dataset

WARM_UP_TOKENS: Final = 16
TREE_ROOM: Final = 64  # KV slots beyond prompt and answer, for rejected nodes
AGREE: Final = 32  # tokens compared between engines with different rounding
REFERENCE: Final = "specinfer-bf16"
Cell = Mapping[str, Any]  # one engine in one round
Run = Mapping[int, Cell]  # an engine's cells with figures, by round
Figure = Callable[[Cell], float | None]


@dataclass(frozen=True)
class Task:
    """The prompts and options, equal for every engine."""

    model: Path
    draft: Path | None
    prompts: Sequence[list[int]]
    max_tokens: int
    rounds: int
    threads: int

    @property
    def context(self) -> int:
        """Return the number of KV slots for a request."""
        return max(map(len, self.prompts)) + self.max_tokens + TREE_ROOM

    def dealt(self, round_: int) -> range:
        """Return the prompts of one round."""
        n = len(self.prompts)
        return range(round_ * n // self.rounds, (round_ + 1) * n // self.rounds)


def main() -> None:
    args = arguments()
    engines = select(args.engines, has_draft=args.draft is not None)
    target = resolve(args.model)
    draft = resolve(args.draft).path if args.draft is not None else None
    datasets = [read_dataset(path) for path in args.prompts] or [built_in()]
    questions = [conversation.turns[0] for conversation in in_turn(datasets, args.limit)]
    prompts = prompt_ids(target, questions)
    rounds = min(args.rounds, len(prompts))
    task = Task(target.path, draft, prompts, args.max_tokens, rounds, args.threads)
    settings = {
        "model": target.path.stem,
        "model_bytes": target.path.stat().st_size,
        "draft": draft.stem if draft is not None else None,
        "datasets": [Path(dataset.name).stem for dataset in datasets],
        "num_prompts": len(prompts),
        "prompts_digest": digest(prompts)[:12],
        "max_tokens": args.max_tokens,
        "rounds": rounds,
        "threads": args.threads,
    }
    study, home = Study(args.out, settings), Home(args.home)
    for round_ in range(rounds):
        first = round_ * len(engines) // rounds
        for engine in engines[first:] + engines[:first]:
            name = f"{engine.name}|{round_}"
            if "answers" in study.cells.get(name, {}):
                continue
            if any("error" in study.cells.get(f"{engine.name}|{r}", {}) for r in range(round_)):
                continue  # an engine that failed in an earlier round has its reason
            study.keep(name, cell := run_cell(engine, task, round_, home, args.timeout))
            said = cell.get("error") or f"{overall_rate(cell):.1f} tokens/s overall"
            print(f"round {round_ + 1}/{rounds} {engine.name}: {said}", flush=True)
            study.write(page(study), args.threads)
    print(study.write(page(study), args.threads))


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m", help="the target: folder, GGUF file or name")
    options.add_argument("--draft", help="the small model of the modes with +draft, which else are left out")
    options.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE.jsonl", help="default: the package's own"
    )
    options.add_argument("--limit", type=natural, default=40, help="prompts of all files (default 40)")
    options.add_argument("--max-tokens", type=natural, default=128, help="of each answer (default 128)")
    options.add_argument("--rounds", type=natural, default=4, help="rounds in turns (default 4)")
    options.add_argument("--threads", type=natural, default=thread_count(), help="default: physical cores")
    options.add_argument("--engines", default="*", help="names, comma-separated, * for any text (default *)")
    options.add_argument("--timeout", type=float, default=1200.0, help="seconds for one answer, or to start")
    options.add_argument("--home", type=Path, default=default_home(), help="folder of the other engines")
    options.add_argument("--out", type=Path, required=True, metavar="PAGE.md", help="cells are beside it")
    return options.parse_args()


def run_cell(engine: Engine, task: Task, round_: int, home: Home, timeout: float) -> dict[str, Any]:
    """Return an engine's answers to a round's prompts, or the reason for their absence."""
    try:
        draft = str(home.weights(task.draft, engine.form)) if engine.draft and task.draft else None
        options = dict(engine.options)
        if engine.script == OURS and "drafts" not in options:
            options |= {"drafts": [draft] if draft else [], "max_batch_size": 1, "prefix_reuse": False}
            options["max_context"] = task.context
        model = str(home.weights(task.model, engine.form))
        setup = {"model": model, "draft": draft, "threads": task.threads, "context": task.context}
        with home.start(engine.script, task.threads, timeout) as worker:
            return converse(worker, setup | {"options": options}, task, round_)
    except UserError as error:
        return {"error": str(error)}


def converse(worker: Worker, setup: dict[str, Any], task: Task, round_: int) -> dict[str, Any]:
    """Load, warm up and answer one by one; raises WorkerError."""
    began = time.perf_counter()
    versions = worker.ask(setup)["versions"]
    loaded = time.perf_counter()

    def ask(index: int, max_tokens: int) -> dict[str, Any]:
        return worker.ask({"prompt": task.prompts[index], "max_tokens": max_tokens})

    dealt = task.dealt(round_)
    cold = loaded - began + ask(dealt[0], WARM_UP_TOKENS)["arrivals"][0][0]
    measuring, busy = time.perf_counter(), worker.busy_elsewhere()
    answers = [answer(index, ask(index, task.max_tokens), task.max_tokens) for index in dealt]
    seconds = time.perf_counter() - measuring
    return {
        "answers": answers,
        "versions": versions,
        "cold_seconds": cold,
        "peak_memory": worker.peak_memory(),
        "busy_elsewhere": max(worker.busy_elsewhere() - busy, 0.0) / seconds,
    }


def answer(prompt: int, reply: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the kept part of a worker's reply; raises WorkerError unless it has `max_tokens` tokens."""
    tokens, arrivals = reply["tokens"], reply["arrivals"]
    if len(tokens) != max_tokens:
        raise WorkerError(f"made {len(tokens)} tokens of {max_tokens} for prompt {prompt}")
    return {
        "prompt": prompt,
        "tokens": len(tokens),
        "head": digest(tokens[:AGREE]),
        "text": digest(tokens),
        "first_seconds": round(arrivals[0][0], 6),
        "first_tokens": arrivals[0][1],
        "seconds": round(arrivals[-1][0], 6),
        "steps": len(arrivals) - 1,  # after the first tokens, which come with the prefill
    }


def _sum(cell: Cell, name: str) -> float:
    return sum(float(a[name]) for a in cell["answers"])


def decode_rate(cell: Cell) -> float | None:
    """Return tokens per second after the first ones; None if all arrived together."""
    seconds = _sum(cell, "seconds") - _sum(cell, "first_seconds")
    return (_sum(cell, "tokens") - _sum(cell, "first_tokens")) / seconds if seconds else None


def overall_rate(cell: Cell) -> float:
    """Return tokens per second from the request on."""
    return _sum(cell, "tokens") / _sum(cell, "seconds")


def tokens_per_step(cell: Cell) -> float | None:
    """Return the mean number of tokens that arrive together after the first."""
    steps = _sum(cell, "steps")
    return (_sum(cell, "tokens") - _sum(cell, "first_tokens")) / steps if steps else None


_FIGURES: Final[Mapping[str, tuple[Figure, int]]] = {  # heading -> figure, digits
    "decode tokens/s": (decode_rate, 1),
    "overall tokens/s": (overall_rate, 1),
    "first token ms": (lambda cell: 1e3 * statistics.median(a["first_seconds"] for a in cell["answers"]), 0),
    "tokens per step": (tokens_per_step, 2),
    "cold start s": (lambda cell: float(cell["cold_seconds"]), 1),
    "peak memory GiB": (lambda cell: float(cell["peak_memory"]) / 2**30, 2),
}


def agreement(ours: Run, theirs: Run, part: Literal["head", "text"]) -> str:
    """Return "3/4": prompts whose first tokens, or texts, are equal, of those that both answered."""
    one, other = (
        {a["prompt"]: a[part] for cell in cells.values() for a in cell["answers"]} for cells in (ours, theirs)
    )
    both = one.keys() & other.keys()
    return f"{sum(one[prompt] == other[prompt] for prompt in both)}/{len(both)}" if both else "-"


def page(study: Study) -> list[str]:
    """Return the settings, a row per engine and mode, each engine at its best, and conditions."""
    settings, cells = study.settings, study.cells
    engines = [one for one in ENGINES if any(key.partition("|")[0] == one.name for key in cells)]
    rounds = range(settings["rounds"])
    found = {one.name: {r: cells.get(f"{one.name}|{r}", {}) for r in rounds} for one in engines}
    runs = {name: {r: c for r, c in of.items() if "answers" in c} for name, of in found.items()}
    draft = f" (draft: {settings['draft']})" if settings["draft"] else ""
    return [
        f"# {settings['model']}{draft}: specinfer and others, batch size 1",
        "",
        f"{settings['num_prompts']} prompts of {', '.join(settings['datasets'])} through the chat "
        "template, the same token ids for every engine; greedy, "
        f"{settings['max_tokens']} tokens each, end of text ignored; {settings['threads']} threads, "
        f"prefix caches off. The prompts are dealt out to {settings['rounds']} rounds; in each every "
        "engine runs, alone, in a process of its own, after a warm-up; each round begins with another one. "
        "Median over rounds [least - most]. Decode is from the first token to the last, overall from the "
        "request, a cold start from the start of the process to the first token, with files in the page "
        "cache; llama-server answers over HTTP, the others in their process. Agreement is in prompts: the "
        "whole text with that of the same engine without speculation, and the first "
        f"{AGREE} tokens with {REFERENCE}'s.",
        *table(
            f"engine | bits | {' | '.join(_FIGURES)} | text as without speculation | first tokens as ours",
            (_row(one, found[one.name], runs) for one in engines),
        ),
        *_best(engines, runs),
        *_conditions(runs),
    ]


def _row(engine: Engine, found: Run, runs: Mapping[str, Run]) -> list[str]:
    if not (own := runs[engine.name]):
        reason = next((cell["error"] for cell in found.values() if cell), "not run yet")
        return [engine.name, engine.bits, reason.replace("|", "/"), *[""] * (len(_FIGURES) + 1)]
    plain, reference = (runs.get(name, {}) for name in (engine.plain, REFERENCE))
    text = "" if engine.plain == engine.name else agreement(own, plain, "text")
    head = "" if engine.name == REFERENCE else agreement(own, reference, "head")
    return [engine.name, engine.bits, *_shown(own), text, head]


def _shown(cells: Run) -> list[str]:
    found = [([figure(c) for c in cells.values()], digits) for figure, digits in _FIGURES.values()]
    known = [([value for value in values if value is not None], digits) for values, digits in found]
    return [spread(values, digits) if values else "not known" for values, digits in known]


def _best(engines: Sequence[Engine], runs: Mapping[str, Run]) -> list[str]:
    """Return a row for each engine over each form of the weights: its mode with the highest overall rate."""
    measured = sorted((one for one in engines if runs[one.name]), key=lambda one: _overall(runs[one.name]))
    best = {one.plain: one.name for one in measured}  # the last is the fastest
    ours, rows = runs.get(f"{OURS}-file-default", {}), []
    for name in sorted(best.values(), key=lambda name: -_overall(runs[name])):
        over = [_times(figure, ours, runs[name]) for figure in (decode_rate, overall_rate)]
        rows.append((name, *_shown(runs[name]), " / ".join(over)))
    over_it = "our default over it: decode / overall, within a round"
    lines = table(f"engine, in its fastest mode | {' | '.join(_FIGURES)} | {over_it}", rows)
    return ["## Each engine at its best", *lines] if rows else []


def _overall(cells: Run) -> float:
    return statistics.median(map(overall_rate, cells.values()))


def _times(figure: Figure, ours: Run, theirs: Run) -> str:
    pairs = [(figure(ours[r]), figure(theirs[r])) for r in ours.keys() & theirs.keys()]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


def _conditions(runs: Mapping[str, Run]) -> list[str]:
    """Return the load of the machine and the versions."""
    done = [(name, cell) for name, cells in runs.items() for cell in cells.values()]
    if not done:
        return []
    versions = sorted({f"{k} {v}" for _, cell in done for k, v in cell["versions"].items()})
    name, busiest = max(done, key=lambda pair: float(pair[1]["busy_elsewhere"]))
    return [
        f"- engines: {', '.join(versions)}",
        f"- other programs kept at most {busiest['busy_elsewhere']:.2f} cores busy (beside {name})",
    ]


if __name__ == "__main__":
    run(main)
