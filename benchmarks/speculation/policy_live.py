"""Compares all speculators under the policy with each alone and with none, live.

    python -m benchmarks.speculation.policy_live --model TARGET --draft DRAFT --quantization int8 \
        --chat alpaca.jsonl --code humaneval.jsonl --maths gsm8k.jsonl --out RESULT.md

Measured in wall time: each text of six kinds is generated in every way before the next one, in a varying
order, so that a slow hour of the machine affects all ways. Texts must be equal. Each way is an engine that
has learned from the same texts; engines share their weights, and the first text of a kind does not count.

    chat, code, maths   the prompts of a data set each, greedy
    edits               code_edits.toml, each with the old file as its prediction
    repeats             chat prompts, each sent three times in a row, at temperature 0.7
    adversarial         chat prompts and random tokens, alternating, at temperature 1.5

The ways:

    none      no speculation
    lookup    lookups in the text and in earlier answers
    lookups   these, and the caller's predictions
    draft     the draft
    all       all of these
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.study import REQUIRED, Study, natural, parser, row, run, settings_of, without_speculation
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.engine.intake import Prompt
from specinfer.errors import UserError
from specinfer.report.dataset import Dataset, read_dataset
from specinfer.speculation_config import SpeculationConfig

WAYS: Final = ("none", "lookup", "lookups", "draft", "all")
RANDOM_TOKENS: Final = 48  # length of a random prompt
LONGEST_PROMPT: Final = 2048  # tokens
_RESAMPLES: Final = 4000  # of texts for an interval


@dataclass(frozen=True, slots=True)
class Edit:
    """A file and the requested change."""

    file: str
    source: str
    ask: str

    @property
    def prompt(self) -> str:
        """The question with the file."""
        return (
            f"{self.ask}\n\nThis is {self.file}:\n\n```\n{self.source}```\n\n"
            "Answer with the whole changed file and nothing else."
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its parameters."""

    prompt: str | Sequence[int]  # a user's message, or token ids
    params: SamplingParams


def main() -> None:
    options = parser(__doc__, model=REQUIRED, draft=[], quantization="none", max_tokens=64)
    for name in ("chat", "code", "maths"):
        options.add_argument(f"--{name}", type=Path, required=True, metavar="FILE.jsonl", help="prompts")
    options.add_argument(
        "--texts", type=natural, default=8, help="texts of each kind, and one more (default 8)"
    )
    args = options.parse_args()
    study = Study("policy-live", args.out, settings_of(args))
    datasets = {name: read_dataset(getattr(args, name)) for name in ("chat", "code", "maths")}
    asked = questions_of(datasets, args.texts + 1, args.max_tokens)
    ways: dict[str, LLM] = {}
    for kind, questions in asked.items():
        if kind not in study.cells:
            ways = ways or engines(build(args), drafted=bool(args.draft))
            study.keep(kind, measured(ways, questions))
            print(row_of(kind, study.cells[kind]), flush=True)
            study.write(page(study.cells, args))


def build(args: Any) -> LLM:
    """Return an LLM with all speculators; the policy chooses among them."""
    return LLM(
        args.model,
        drafts=tuple(args.draft),
        quantization=args.quantization,
        draft_quantization=args.quantization if args.draft else "auto",
        lookup=True,
        max_context=LONGEST_PROMPT + args.max_tokens,
        max_batch_size=16,
    )


def read_edits() -> list[Edit]:
    """Return all edits, in file order."""
    text = Path(__file__).with_name("code_edits.toml").read_text(encoding="utf-8")
    return [Edit(**item) for item in tomllib.loads(text)["edit"]]


def questions_of(datasets: Mapping[str, Dataset], texts: int, max_tokens: int) -> dict[str, list[Question]]:
    """Return the questions of each kind."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    asked = {
        name: [Question(one.turns[0], greedy) for one in dataset.conversations[:texts]]
        for name, dataset in datasets.items()
    }
    chat = asked["chat"]
    warm, hot = replace(greedy, temperature=0.7), replace(greedy, temperature=1.5)
    tokens = np.random.default_rng(0).integers(300, 20_000, (len(chat), RANDOM_TOKENS)).tolist()
    edits = [Question(edit.prompt, replace(greedy, prediction=edit.source)) for edit in read_edits()]
    return {
        **asked,
        "edits": edits[:texts],
        "repeats": [Question(one.prompt, warm) for one in chat[: -(-texts // 3)] for _ in range(3)],
        "adversarial": [Question(t if i % 2 else chat[i].prompt, hot) for i, t in enumerate(tokens)],
    }


def engines(everybody: LLM, *, drafted: bool) -> dict[str, LLM]:
    """Return an engine for each way; without a draft they use only lookups."""
    config, speculation = everybody.config, everybody.config.speculation
    others = {"lookup": SpeculationConfig(lookup=True)}
    if drafted:
        others["lookups"] = SpeculationConfig(lookup=True)
        others["draft"] = replace(speculation, lookup=False)
    found = {name: everybody.variant(replace(config, speculation=one)) for name, one in others.items()}
    return {"none": without_speculation(everybody), **found, "all": everybody}


def measured(ways: Mapping[str, LLM], questions: list[Question]) -> dict[str, Any]:
    """Return seconds of every text but the first, in every way; raises UserError if texts differ."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    steps, tokens = dict.fromkeys(ways, 0), 0
    for number, question in enumerate(questions):
        texts = dict[str, tuple[int, ...]]()
        first = number % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            began = time.perf_counter()
            output = answer(ways[name], question, number, predicted=name in ("lookups", "all"))
            taken = time.perf_counter() - began
            texts[name] = tuple(output.token_ids)
            if number:
                seconds[name].append(taken)
                steps[name] += output.figures.steps
        if len({*texts.values()}) > 1:
            raise UserError(f"text {number} is another one in some way: {texts}")
        tokens += len(texts["none"]) if number else 0
    return {
        "texts": len(questions) - 1,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_step": {name: tokens / count for name, count in steps.items()},
    }


def answer(llm: LLM, question: Question, seed: int, *, predicted: bool) -> RequestOutput:
    """Return one answer, with the caller's prediction if `predicted`."""
    params = replace(question.params, seed=seed)
    if not predicted:
        params = replace(params, prediction=None)
    if isinstance(question.prompt, str) and llm.tokenizer.has_chat_template:
        return llm.chat([[{"role": "user", "content": question.prompt}]], params)[0]
    prompt: Prompt = question.prompt
    if not isinstance(prompt, str):
        prompt = [token % llm.models.target.config.vocab_size for token in prompt]
    return llm.generate([prompt], params)[0]


def page(cells: Mapping[str, Any], args: Any) -> list[str]:
    drafts = ", ".join(Path(draft).stem for draft in args.draft) or "no draft"
    ways = [name for name in WAYS if any(name in cell["seconds"] for cell in cells.values())]
    return [
        f"# Everybody together, live: {Path(args.model).stem} with {drafts}",
        "",
        f"{args.quantization} weights, one request at a time, {args.max_tokens} tokens at most, each text in "
        "every way before the next one; speed over no speculation, tokens a step in brackets, and over the "
        "best of the others, with 95% intervals over texts, which are paired. All texts were the same.",
        "",
        row("kind", "texts", "tokens", "without, tok/s", *ways[1:], "all over the best of them alone"),
        row(*["---"] * (len(ways) + 4)),
        *(row_of(kind, cell) for kind, cell in cells.items()),
    ]


def row_of(kind: str, cell: Mapping[str, Any]) -> str:
    seconds = cell["seconds"]
    ratios = [
        f"{over(seconds['none'], seconds[name])} ({cell['tokens_per_step'][name]:.2f})"
        for name in seconds
        if name != "none"
    ]
    alone = [name for name in seconds if name not in ("none", "all")]
    best = min(alone, key=lambda name: sum(seconds[name]), default=None)
    beside = "" if best is None else f"{over(seconds[best], seconds['all'])} ({best})"
    rate = cell["tokens"] / sum(seconds["none"])
    return row(kind, cell["texts"], cell["tokens"], f"{rate:.1f}", *ratios, beside)


def over(before: Sequence[float], after: Sequence[float]) -> str:
    """Return how many times as fast `after` is, both in seconds of the same texts, and its 95% interval.

    Texts are paired, as a slow text is slow in both. The interval is a bootstrap over texts: the range for
    other texts of the same kind.
    """
    seconds = np.array([before, after])  # [2, texts]
    texts = seconds.shape[1]
    drawn = np.random.default_rng(0).integers(0, texts, (_RESAMPLES, texts))
    sums = seconds[:, drawn].sum(-1)
    low, high = np.percentile(sums[0] / sums[1], (2.5, 97.5))
    return f"{seconds[0].sum() / seconds[1].sum():.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    run(main)
