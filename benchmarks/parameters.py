"""Does every sampling parameter give the same text with speculation? And what do processors cost?

    python benchmarks/parameters.py --model TARGET --dataset alpaca.jsonl --limit 100 --out RESULT.md

For each setting below the same seeded requests are answered without speculation and with it, each with a
seed of its own. At the first token that differs the target's logits are computed once more by the plainest
way and processed by the request's parameters: a gap that rounding can close is explained
(specinfer/check/difference.py), anything more is wrong. A timer around the processors says which share of
the steps' time they take, in batches of --batch-size requests.

Finished settings are kept in a JSON file beside the Markdown, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance_lines

from specinfer import LLM, EngineConfig, RequestOutput, SamplingParams
from specinfer.check.difference import find_difference
from specinfer.check.target_alone import TargetAlone
from specinfer.config import SpeculationConfig
from specinfer.engine.admission import Admission
from specinfer.models.decoder import LanguageModel
from specinfer.processors.pipeline import Processors
from specinfer.report.dataset import read_dataset
from specinfer.report.provenance import commit, provenance
from specinfer.request import Request
from specinfer.speculate.budget import TreeBudget
from specinfer.speculation_params import SpeculationParams
from specinfer.tokenizer import Tokenizer

LEAST = 40  # tokens of an answer in the setting min_tokens
GOAL = 0.05  # of a step's time, for processors; grammars have a goal per node, in benchmarks/grammar.py
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 60},
        "certain": {"type": "boolean"},
        "sources": {"type": "array", "items": {"enum": ["book", "web", "memory"]}, "maxItems": 2},
    },
    "required": ["answer", "certain", "sources"],
    "additionalProperties": False,
}
BIASES = {" of": -100.0, " a": -2.0, " you": 1.5, "\n": 1.0}
COMMON_WORDS = ("the", "and", "is", "important", "such as", "a variety of", "it's")


def settings_for(tokenizer: Tokenizer, vocab: int) -> dict[str, dict[str, Any]]:
    """Name of a setting -> what its requests ask for, besides seed and length."""
    ascii_only = [t for t in range(min(vocab, tokenizer.vocab_size)) if tokenizer.token_bytes[t].isascii()]
    plain_ids = sorted({*ascii_only, *tokenizer.eos_token_ids})
    biased = {tokenizer.encode(text, add_special=False)[0]: bias for text, bias in BIASES.items()}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    return {
        "seed": {"temperature": 1.0},
        "temperature 0": {"temperature": 0},
        "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
        "presence_penalty": {"presence_penalty": 1.0},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "repetition_penalty, greedy": {"repetition_penalty": 1.2, "temperature": 0},
        "logit_bias": {"logit_bias": biased},
        "bad_words": {"bad_words": COMMON_WORDS},
        "allowed_token_ids": {"allowed_token_ids": plain_ids},
        "min_tokens": {"min_tokens": LEAST, "stop": (".",)},
        "regex": {"regex": r"(Yes|No|Perhaps), because [a-z ,']{20,120}\."},
        "choice": {"choice": ["Yes, certainly.", "Yes, but it depends.", "No, never.", "No, not any more."]},
        "json_schema": {"response_format": schema},
        "all of them": {
            "top_k": 100,
            "top_p": 0.95,
            "min_p": 0.01,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.05,
            "logit_bias": biased,
            "bad_words": COMMON_WORDS,
            "allowed_token_ids": plain_ids,
            "min_tokens": 20,
        },
    }


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in processors, and how often they were asked."""

    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every call to a processor, whoever makes it, until the block ends."""
        methods = {name: getattr(Processors, name) for name in ("apply", "permits", "commit")}
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
            try:
                return method(*args, **named)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls[name] = self.calls.get(name, 0) + 1

        return timed


class ProcessedTarget(TargetAlone):
    """The target alone, seen through one request's parameters: differences are judged on what it chose by."""

    def __init__(self, model: LanguageModel, admission: Admission, request: Request) -> None:
        super().__init__(model)
        self._admission = admission
        self._request = request

    def logits_after(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The processed logits of the token after each text, prompt included, [len(texts), vocab]."""
        rows = super().logits_after(texts)
        prompt = len(self._request.prompt_token_ids)
        processed = []
        for row, text in zip(rows, texts, strict=True):
            processors = self._admission.processors(self._request)
            processors.commit(text[prompt:])
            processed.append(processors.apply(row, ()))
        return np.stack(processed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target: folder, GGUF file or name")
    parser.add_argument("--draft", action="append", default=[], help="a small speculative model; repeatable")
    parser.add_argument("--expansion", default="1,1,3,1,1", help="of the drafts' trees")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--dataset", action="append", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("--limit", type=int, default=100, help="requests of each setting (default 100)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, required=True, help="Markdown file; its results lie beside it as .json"
    )
    args = parser.parse_args()
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; allowed: an integer >= 1")
    if args.max_tokens < LEAST:
        parser.error(f"--max-tokens is {args.max_tokens}; allowed: an integer >= {LEAST}")

    questions = read_questions(args.dataset, args.limit)
    shared: dict[str, Any] = {"dtype": args.dtype, "max_batch_size": args.batch_size, "max_context": 2048}
    speculation: dict[str, Any] = {
        "drafts": tuple(args.draft),
        "ngram": not args.draft,
        "expansion": tuple(int(k) for k in args.expansion.split(",")),
        "tree_size": "fixed",
    }
    speculative = LLM(args.model, **shared, **speculation)
    plain = LLM.from_models(
        EngineConfig.from_options(args.model, shared), replace(speculative.models, drafts={})
    )
    run = {
        "model": Path(args.model).name,
        "speculators": [Path(draft).name for draft in args.draft] or ["n-gram"],
        "expansion": args.expansion,
        "dtype": str(speculative.models.target.dtype).removeprefix("torch."),
        "max_tokens": args.max_tokens,
        "batch_size": args.batch_size,
        "datasets": [path.name for path in args.dataset],
        "requests": len(questions),
        "questions": _digest(questions),
    }
    vocab = speculative.models.target.config.vocab_size
    settings = settings_for(speculative.tokenizer, vocab)
    results_file = args.out.with_suffix(".json")
    results = read_results(results_file, run, settings)
    for name, asked in settings.items():
        if name in results:
            continue
        params = [
            SamplingParams(**{"temperature": 0.8, "seed": seed, "max_tokens": args.max_tokens, **asked})
            for seed in range(1, len(questions) + 1)
        ]
        result = {
            "digest": _digest(asked),
            "commit": commit(),
            **measure(plain, speculative, questions, params),
        }
        results[name] = result
        print(row_of(name, result), flush=True)
        stored = {"run": run, "provenance": provenance(), "settings": results}
        _write(results_file, json.dumps(stored, indent=1) + "\n")
        _write(args.out, markdown(run, settings, results))
    _write(args.out, markdown(run, settings, results))
    print("\n".join(summary(settings, results)))
    raise SystemExit(1 if any(unexplained(results[name]) for name in settings) else 0)


def read_questions(paths: Sequence[Path], limit: int) -> list[str]:
    """The first `limit` first turns, taken from the data sets in turn."""
    sets = [[c.turns[0] for c in read_dataset(path).conversations] for path in paths]
    mixed = [part[i] for i in range(max(map(len, sets))) for part in sets if i < len(part)]
    return mixed[:limit]


def measure(
    plain: LLM, speculative: LLM, questions: Sequence[str], params: Sequence[SamplingParams]
) -> dict[str, Any]:
    """One setting without and with speculation, as plain JSON values."""
    off = SpeculationParams(enabled=False)
    # Without any: an engine that has no speculator still guesses what a grammar forces.
    expected, alone = answers(plain, questions, [replace(asked, speculation=off) for asked in params])
    got, beside = answers(speculative, questions, params)
    model = speculative.models.target
    admission = Admission(
        speculative.tokenizer,
        TreeBudget(SpeculationConfig(), (), ()),
        vocab=model.config.vocab_size,
        max_context=speculative.engine.max_context,
        capacity=speculative.engine.max_context,
    )
    differences = []
    for number, (ours, theirs, asked) in enumerate(zip(expected, got, params, strict=True)):
        request = Request("judged", ours.prompt_token_ids, asked, ours.seed)
        found = find_difference(ProcessedTarget(model, admission, request), asked, ours, theirs)
        if found is not None:
            differences.append({"request": number, **found.to_json(), "text": str(found)})
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
    """The outputs, and the figures of the run."""
    llm.engine.clock.reset()
    watch = Stopwatch()
    with watch.running():
        if llm.tokenizer.has_chat_template:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in questions], params)
        else:
            outputs = llm.generate(questions, params)
    clock = llm.engine.clock
    return outputs, {
        "steps": clock.steps,
        "tokens": sum(len(output.token_ids) for output in outputs),
        "request_steps": sum(output.figures.steps for output in outputs),
        "request_step_tokens": sum(output.figures.output_tokens for output in outputs),
        "step_seconds": sum(clock.seconds.values()),
        "processor_seconds": watch.seconds,
        "processor_calls": watch.calls,
    }


def read_results(
    path: Path, run: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What earlier runs measured; settings that ask for something else since are left out."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["run"] != run:
        raise SystemExit(f"{path} holds the run {stored['run']}, not {run}; give another --out")
    found = stored["settings"]
    return {
        name: found[name]
        for name, asked in settings.items()
        if found.get(name, {}).get("digest") == _digest(asked)
    }


def unexplained(result: Mapping[str, Any]) -> int:
    """How many texts differ by more than rounding does."""
    return sum(not difference["explained"] for difference in result["differences"])


def markdown(
    run: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]], results: Mapping[str, Any]
) -> str:
    """The results as a page."""
    done = [name for name in settings if name in results]
    commits = sorted({results[name]["commit"] or "not a checkout" for name in done})
    return "\n".join(
        [
            f"# Every sampling parameter with and without speculation: {run['model']}",
            "",
            f"{run['requests']} seeded requests per setting, the first questions of "
            f"{', '.join(run['datasets'])}; {run['dtype']}, batches of {run['batch_size']}, at most "
            f"{run['max_tokens']} tokens, temperature 0.8 where nothing else is said; speculators: "
            f"{', '.join(run['speculators'])}. Processors: their share of the time of all steps, prefill "
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
            "",
            *provenance_lines(),
            *([f"- settings measured at: {', '.join(commits)}"] if set(commits) != {commit()} else []),
            "",
        ]
    )


def summary(settings: Mapping[str, Mapping[str, Any]], results: Mapping[str, Any]) -> list[str]:
    """The figures over all settings measured so far, as Markdown lines."""
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
    """One setting as a row of the table."""
    plain, speculative = result["plain"], result["speculative"]
    calls = speculative["processor_calls"].get("apply", 0)
    cells = (
        name,
        f"{result['identical']} of {result['requests']}",
        len(result["differences"]) - unexplained(result),
        unexplained(result),
        f"{_ratio(speculative['request_step_tokens'], speculative['request_steps']):.2f}",
        f"{_share(plain):.2%}",
        f"{_share(speculative):.2%}",
        f"{_ratio(speculative['processor_seconds'], calls) * 1e6:.0f}" if calls else "-",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _has_form(asked: Mapping[str, Any]) -> bool:
    return any(name in asked for name in ("regex", "choice", "response_format"))


def _share(side: Mapping[str, Any]) -> float:
    return _ratio(side["processor_seconds"], side["step_seconds"])


def _ratio(a: float, b: float) -> float:
    """a / b; 0 where nothing was counted."""
    return a / b if b else 0.0


def _shown(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A setting for the page: long lists by their length."""
    return {
        name: f"{len(value)} ids" if isinstance(value, list) and len(value) > 20 else value
        for name, value in asked.items()
    }


def _digest(value: Any) -> str:
    """Tells whether a result belongs to this question or setting."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
