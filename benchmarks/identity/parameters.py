"""Checks every sampling parameter with speculation, and measures the time of logit processors.

    python -m benchmarks.identity.parameters --model TARGET --dataset alpaca.jsonl --limit 100 --out RESULT.md

It is a long `specinfer check --suite parameters`: for each of its settings (specinfer/check/parameters.py)
the same seeded requests are answered without speculation and with it. At the first different token the
target's logits are computed again by the plainest path and processed by the request's parameters. A gap
within rounding is explained, a larger one is an error. A timer around the processors gives their share of the
steps' time, in batches of --batch-size.

A JSON file beside the Markdown keeps finished settings, so an interrupted run continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.study import (
    SPECULATING,
    Study,
    ask,
    digest,
    parser,
    questions_of,
    row,
    run,
    without_speculation,
)
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.check.difference import find_difference
from specinfer.check.parameters import MIN_TOKENS, OFF, Setting, judge, params_of, settings_for
from specinfer.processors.pipeline import Processors

GOAL = 0.05  # share of a step's time for processors; grammars have a goal per node, in speculation/grammar.py


@dataclass(slots=True)
class Stopwatch:
    """Seconds in processors, and number of calls."""

    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every call to a processor until the block ends."""
        methods = {name: getattr(Processors, name) for name in ("changes", "change", "permits", "commit")}
        for name, method in methods.items():
            setattr(Processors, name, self._timed(name, method))
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(Processors, name, method)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = method(*args, **named)
            self.seconds += time.perf_counter() - began
            if name != "changes" or answer is not None:  # None: masks of whole rows are left to `change`
                self.calls[name] = self.calls.get(name, 0) + 1
            return answer

        return timed


def main() -> None:
    options = parser(__doc__, **SPECULATING, limit=100)
    args = options.parse_args()
    if args.max_tokens < MIN_TOKENS:
        options.error(f"--max-tokens is {args.max_tokens}; allowed: an integer >= {MIN_TOKENS}")

    questions = questions_of(args.dataset, args.limit)
    speculative = LLM(
        args.model,
        dtype=args.dtype,
        max_batch_size=args.batch_size,
        max_context=2048,
        drafts=tuple(args.draft),
        lookup=not args.draft,
        expansion=args.expansion,
        tree_size="fixed",
    )
    plain = without_speculation(speculative)
    about = {
        "model": Path(args.model).name,
        "speculators": [Path(draft).name for draft in args.draft] or ["lookup"],
        "expansion": speculative.config.speculation.shape,
        "dtype": str(speculative.models.target.dtype).removeprefix("torch."),
        "max_tokens": args.max_tokens,
        "batch_size": args.batch_size,
        "datasets": [path.name for path in args.dataset],
        "requests": len(questions),
        "questions": digest(questions),
    }
    vocab = speculative.models.target.config.vocab_size
    settings = settings_for(speculative.tokenizer, vocab)
    digests = {name: digest(setting) for name, setting in settings.items()}
    study = Study("parameters", args.out, about, digests)
    for name, setting in settings.items():
        if name not in study.cells:
            params = params_of(setting, len(questions), args.max_tokens)
            cell = {"digest": digests[name], **measure(plain, speculative, questions, params)}
            study.keep(name, cell)
            print(row_of(name, cell), flush=True)
            study.write(page(about, settings, study.cells))
    study.write(page(about, settings, study.cells))
    print("\n".join(summary(settings, study.cells)))
    raise SystemExit(1 if any(map(unexplained, study.cells.values())) else 0)


def measure(
    plain: LLM, speculative: LLM, questions: Sequence[str], params: Sequence[SamplingParams]
) -> dict[str, Any]:
    """Run one setting without and with speculation; return plain JSON values."""
    expected, alone = answers(plain, questions, [replace(asked, speculation=OFF) for asked in params])
    got, beside = answers(speculative, questions, params)
    differences = []
    for number, (ours, theirs, asked) in enumerate(zip(expected, got, params, strict=True)):
        found = find_difference(judge(speculative, asked)(ours), asked, ours, theirs)
        if found is not None:
            differences.append({"request": number, **asdict(found), "text": str(found)})
    return {
        "requests": len(questions),
        "identical": len(questions) - len(differences),
        "differences": differences,
        "errors": sum(output.error is not None for output in expected),
        "plain": alone,
        "speculative": beside,
    }


def answers(
    llm: LLM, questions: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Return the outputs and the figures of the run."""
    before = llm.statistics()
    watch = Stopwatch()
    with watch.running():
        outputs = ask(llm, questions, params)
    done = llm.statistics().since(before)
    return outputs, {
        "steps": done.steps,
        "tokens": sum(len(output.token_ids) for output in outputs),
        "request_steps": sum(output.figures.steps for output in outputs),
        "request_step_tokens": sum(output.figures.output_tokens for output in outputs),
        "step_seconds": sum(done.stage_seconds.values()),
        "processor_seconds": watch.seconds,
        "processor_calls": watch.calls,
    }


def unexplained(result: Mapping[str, Any]) -> int:
    """Return the number of texts that differ by more than rounding."""
    return sum(not difference["explained"] for difference in result["differences"])


def page(about: Mapping[str, Any], settings: Mapping[str, Setting], results: Mapping[str, Any]) -> list[str]:
    done = [name for name in settings if name in results]
    return [
        f"# Every sampling parameter with and without speculation: {about['model']}",
        "",
        f"{about['requests']} seeded requests per setting, the first questions of "
        f"{', '.join(about['datasets'])}; {about['dtype']}, batches of {about['batch_size']}, at most "
        f"{about['max_tokens']} tokens, temperature 0.8 where nothing else is said; speculators: "
        f"{', '.join(about['speculators'])}. Processors: their share of the time of all steps, prefill "
        "included.",
        "",
        *summary(settings, results),
        "",
        "| setting | identical | explained | unexplained | tokens per step | processors, without "
        "| processors, with | microseconds a row |",
        "|---|---|---|---|---|---|---|---|",
        *(row_of(name, results[name]) for name in done),
        "",
        *(f"- {name}: {json.dumps(_shown(settings[name]))}" for name in done),
    ]


def summary(settings: Mapping[str, Setting], results: Mapping[str, Any]) -> list[str]:
    """Return the figures over all measured settings, as Markdown lines."""
    done = {name: results[name] for name in settings if name in results}
    if not done:
        return ["- no setting measured yet"]
    least = min(done, key=lambda name: done[name]["identical"] / done[name]["requests"])
    free = {name: result for name, result in done.items() if not _has_form(settings[name])}
    dearest = max(free, key=lambda name: _share(free[name]["speculative"]))
    differences = [(name, found) for name, result in done.items() for found in result["differences"]]
    return [
        f"- settings: {len(done)} of {len(settings)}",
        f"- identical texts: {sum(r['identical'] for r in done.values())} of "
        f"{sum(r['requests'] for r in done.values())}; least in one setting: "
        f"{done[least]['identical']} of {done[least]['requests']} ({least})",
        f"- different texts, not explained by rounding: {sum(map(unexplained, done.values()))}",
        *(
            f"  - {name}, request {found['request']}, {found['text']}: "
            f"{'rounding' if found['explained'] else 'NOT EXPLAINED'}"
            for name, found in differences
        ),
        f"- dearest processors without a form: {_share(free[dearest]['speculative']):.2%} of a step with "
        f"speculation ({dearest}); the goal is at most {GOAL:.0%}",
    ]


def row_of(name: str, result: Mapping[str, Any]) -> str:
    """Return a setting's row of the table."""
    plain, speculative = result["plain"], result["speculative"]
    counted = speculative["processor_calls"]
    calls = sum(counted.get(name, 0) for name in ("changes", "change", "apply"))  # "apply" in older cells
    return row(
        name,
        f"{result['identical']} of {result['requests']}",
        len(result["differences"]) - unexplained(result),
        unexplained(result),
        f"{_ratio(speculative['request_step_tokens'], speculative['request_steps']):.2f}",
        f"{_share(plain):.2%}",
        f"{_share(speculative):.2%}",
        f"{_ratio(speculative['processor_seconds'], calls) * 1e6:.0f}" if calls else "-",
    )


def _has_form(asked: Setting) -> bool:
    return any(name in asked for name in ("regex", "choice", "response_format"))


def _share(side: Mapping[str, Any]) -> float:
    return _ratio(side["processor_seconds"], side["step_seconds"])


def _ratio(a: float, b: float) -> float:
    """Return a / b, or 0 if b is 0."""
    return a / b if b else 0.0


def _shown(asked: Setting) -> dict[str, Any]:
    """Return a setting for the page, with long lists as their lengths."""
    return {
        name: f"{len(value)} ids" if isinstance(value, list) and len(value) > 20 else value
        for name, value in asked.items()
    }


if __name__ == "__main__":
    run(main)
