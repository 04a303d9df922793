"""Measures grammars over the schemas of the tests: mask time per visited node, compile time.

    python -m benchmarks.speculation.grammar --model MODEL.gguf --out RESULT.md

For each schema a seeded random walk through the grammar makes a document. Two requests then follow it in
steps of four tokens: masks of a path of four nodes, then the commit. The first request uses a new grammar;
the second finds the automaton that the first one built.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.study import REQUIRED, Study, parser, row, run
from specinfer.grammar.grammar import Grammar, GrammarCompiler
from specinfer.hub import resolve
from specinfer.structured_output import OutputKind, StructuredOutput, structured_output
from specinfer.tokenizer import Tokenizer

SCHEMAS = Path(__file__).parents[2] / "tests" / "unit" / "grammar" / "schemas.json"
TOKENS_PER_STEP = 4
MAX_DOCUMENT = 200  # tokens
CLOSING = {b'"', b"}", b"]", b'"}', b"}}", b'"]'}


def main() -> None:
    options = parser(__doc__, model=REQUIRED)
    options.add_argument("--vocab-size", type=int, help="logits of the model (default: its tokenizer's size)")
    args = options.parse_args()

    tokenizer = Tokenizer.load(resolve(args.model))
    vocab_size = args.vocab_size or tokenizer.vocab_size
    times: dict[str, list[float]] = defaultdict(list)
    per_schema: dict[str, float] = {}
    scout, measured = (_compiler(tokenizer, vocab_size, times) for _ in range(2))
    for entry in json.loads(SCHEMAS.read_text()):
        spec = structured_output(response_format={"type": "json_schema", "json_schema": entry})
        assert spec is not None
        document = _document(scout.compile(spec), tokenizer)
        with _timed(times["compile and try a new schema"]):
            grammar = measured.compile(spec)
        _go_through(grammar, document, "first request", times)
        before = len(times["mask, second request"])
        _go_through(grammar, document, "second request", times)
        per_schema[entry["name"]] = float(np.mean(times["mask, second request"][before:]))
    study = Study("grammar", args.out, {"model": Path(args.model).name})
    print(study.write(page(study.settings["model"], vocab_size, times, per_schema)))


def _compiler(tokenizer: Tokenizer, vocab_size: int, times: dict[str, list[float]]) -> GrammarCompiler:
    """Return a compiler that has already read the vocabulary."""
    with _timed(times["read the vocabulary, once a model"]):
        compiler = GrammarCompiler(tokenizer, vocab_size)
        compiler.compile(StructuredOutput(OutputKind.REGEX, "a"))
    return compiler


def _document(grammar: Grammar, tokenizer: Tokenizer) -> list[int]:
    """Return token ids of a document: random legal tokens, half of the time one that closes something."""
    state, rng = grammar.state(), np.random.default_rng(0)
    tokens: list[int] = []
    while len(tokens) < MAX_DOCUMENT:
        legal = np.flatnonzero(state.allowed())
        if tokenizer.eos_token_ids & set(legal.tolist()):
            break
        closing = [i for i in legal.tolist() if tokenizer.token_bytes[i] in CLOSING]
        tokens.append(int(rng.choice(closing if closing and rng.random() < 0.5 else legal)))
        state.commit(tokens[-1:])
    return tokens


def _go_through(grammar: Grammar, document: list[int], which: str, times: dict[str, list[float]]) -> None:
    state = grammar.state()
    for at in range(0, len(document), TOKENS_PER_STEP):
        path = document[at : at + TOKENS_PER_STEP]
        for depth in range(len(path)):
            with _timed(times[f"mask, {which}"]):
                allowed = state.allowed(path[:depth])
            assert allowed[path[depth]]
        with _timed(times["forced tokens after a node"]):
            state.forced(path[:1], 8)
        with _timed(times["a guess checked without a mask"]):
            state.permits(path, document[0])
        with _timed(times[f"commit of {TOKENS_PER_STEP} tokens"]):
            state.commit(path)


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    """Add the CPU milliseconds of the block."""
    began = time.thread_time()
    yield
    into.append((time.thread_time() - began) * 1e3)


def page(
    model: str, vocab_size: int, times: dict[str, list[float]], per_schema: dict[str, float]
) -> list[str]:
    lines = [
        f"# The cost of a grammar: {len(per_schema)} schemas, vocabulary of {vocab_size} ({model})",
        "",
        "Milliseconds of one processor. A mask is the array of all legal tokens at one visited node, the way "
        "there included.",
        "",
        "| | mean | median | p99 | max | times |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in times.items():
        figures = (np.mean(values), np.median(values), np.percentile(values, 99), np.max(values))
        lines.append(row(name, *(f"{x:.3f}" for x in figures), len(values)))
    slow = sorted(per_schema.items(), key=lambda item: -item[1])[:5]
    listed = ", ".join(f"{name} {value:.2f}" for name, value in slow)
    lines += ["", f"Slowest schemas by their mean mask in the second request: {listed}.", ""]
    return [*lines, f"Made with llguidance {version('llguidance')}."]


if __name__ == "__main__":
    run(main)
