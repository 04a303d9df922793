"""Measures tokens per step with predictions: forty code edits, with the old file as the prediction.

    python -m benchmarks.speculation.prediction --model TARGET --out RESULT.md

Each edit of benchmarks/code_edits.toml is a file and one requested change. It is answered twice, greedily,
one request at a time: without speculation, and with the old file as the prediction and no other speculator.
The two alternate in going first, because a machine's speed drifts. Rates start after the first token, so that
a cached prompt does not matter.

A JSON file beside the Markdown keeps finished edits, so an interrupted run continues; an edit whose prompt
has changed runs again.
"""

from __future__ import annotations

import difflib
import hashlib
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.study import REQUIRED, Study, ask, natural, parser, row, run
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.check.difference import PlainTarget, find_difference

EDITS = Path(__file__).with_name("code_edits.toml")
SPECULATOR = "prediction"  # its name in the figures
GOAL = 5.0  # tokens per step
LONGEST_PROMPT = 2048  # tokens
FENCE = "```"


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
            f"{self.ask}\n\nThis is {self.file}:\n\n{FENCE}\n{self.source}{FENCE}\n\n"
            "Answer with the whole changed file and nothing else."
        )

    @property
    def digest(self) -> str:
        """A digest of the prompt, to match results to it."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


def main() -> None:
    options = parser(__doc__, model=REQUIRED, max_tokens=1024)
    options.add_argument("--limit", type=natural, help="only the first edits (default: all)")
    options.add_argument(
        "--plain", type=int, help="answer only the first PLAIN edits without a prediction, too (default: all)"
    )
    args = options.parse_args()

    everything = read_edits()
    edits = everything[: args.limit]
    settings = {"model": Path(args.model).name, "max_tokens": args.max_tokens}
    study = Study("prediction", args.out, settings, {edit.file: edit.digest for edit in everything})
    results = study.cells
    params = SamplingParams(temperature=0, seed=0, max_tokens=args.max_tokens)
    llm: LLM | None = None
    for number, edit in enumerate(edits):
        compare = args.plain is None or number < args.plain
        if edit.file in results and (results[edit.file]["plain"] is not None or not compare):
            continue
        if llm is None:
            context = LONGEST_PROMPT + args.max_tokens
            llm = LLM(args.model, max_batch_size=1, max_context=context, tree_size="fixed", lookup=False)
            _ask(llm, edit, replace(params, max_tokens=min(16, args.max_tokens)))  # warms up
        result = measure(llm, edit, params, prediction_first=number % 2 == 1, compare=compare)
        study.keep(edit.file, result)
        print(_row(edit, result), flush=True)
        study.write(page(edits, results, settings))
    study.write(page(edits, results, settings))
    print("\n".join(_summary(edits, results)))
    wrong = [edit.file for edit in edits if unexplained(results[edit.file])]
    raise SystemExit(1 if wrong else 0)


def read_edits() -> list[Edit]:
    """Return all edits, in file order."""
    return [Edit(**item) for item in tomllib.loads(EDITS.read_text(encoding="utf-8"))["edit"]]


def measure(
    llm: LLM, edit: Edit, params: SamplingParams, *, prediction_first: bool, compare: bool
) -> dict[str, Any]:
    """Answer an edit with its prediction and, if `compare`, without; return plain JSON values."""
    sides = {"predicted": replace(params, prediction=edit.source)}
    if compare:
        sides = {"plain": params, **sides}
    order = reversed(sides) if prediction_first else iter(sides)
    outputs = {side: _ask(llm, edit, sides[side]) for side in order}
    plain, predicted = outputs.get("plain"), outputs["predicted"]
    difference = (
        None if plain is None else find_difference(PlainTarget(llm.models.target), params, plain, predicted)
    )
    removed, added = changed_lines(edit.source, predicted.text)
    return {
        "digest": edit.digest,
        "prompt_tokens": len(predicted.prompt_token_ids),
        "plain": None if plain is None else _side(plain),
        "predicted": _side(predicted),
        "difference": None
        if difference is None
        else {
            **asdict(difference),
            "text": str(difference),
            "same_text": plain is not None and plain.text == predicted.text,
        },
        "lines_removed": removed,
        "lines_added": added,
    }


def changed_lines(source: str, answer: str) -> tuple[int, int]:
    """Count lines of the source that the answer lacks, and new lines of the answer.

    If the answer has a Markdown fence, only the part between its first and last fence counts; a truncated
    answer may have no closing fence.
    """
    lines = answer.splitlines()
    fences = [i for i, line in enumerate(lines) if line.startswith(FENCE)]
    if fences:
        lines = lines[fences[0] + 1 : fences[-1] if len(fences) > 1 else None]
    matcher = difflib.SequenceMatcher(None, source.splitlines(), lines, autojunk=False)
    changes = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    return sum(i2 - i1 for _, i1, i2, _, _ in changes), sum(j2 - j1 for _, _, _, j1, j2 in changes)


def unexplained(result: Mapping[str, Any]) -> bool:
    """True if the two texts differ by more than rounding explains."""
    return result["difference"] is not None and not result["difference"]["explained"]


def page(edits: Sequence[Edit], results: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    return [
        f"# Code edits with the old file as the prediction: {settings['model']}",
        "",
        f"Greedy, one request at a time, at most {settings['max_tokens']} tokens; no draft model and no "
        "other speculator. A step is one pass of the target after the prefill; without a prediction it "
        "gives one token. Lines: those of the file that the answer lacks, and those it has instead.",
        "",
        *_summary(edits, results),
        "",
        "| file | lines | changed | answer tokens | ended | tokens/s without | tokens/s with | speedup "
        "| tokens per step | accepted | rejected | identical |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(edit, results[edit.file]) for edit in edits if edit.file in results),
    ]


def _summary(edits: Sequence[Edit], results: Mapping[str, Any]) -> list[str]:
    """Return the figures over all measured edits, as Markdown lines."""
    done = {edit.file: results[edit.file] for edit in edits if edit.file in results}
    if not done:
        return ["- no edit measured yet"]
    compared = [r for r in done.values() if r["plain"] is not None]
    plain, faster = (_total([r[side] for r in compared]) for side in ("plain", "predicted"))
    predicted = _total([r["predicted"] for r in done.values()])
    per_edit = [_per_step(r["predicted"]) for r in done.values()]
    differing = {file: r["difference"] for file, r in done.items() if r["difference"] is not None}
    same_text = sum(d["same_text"] for d in differing.values())
    proposed = predicted["accepted"] + predicted["rejected"]
    copied = [file for file, r in done.items() if not r["lines_removed"] and not r["lines_added"]]
    return [
        f"- edits: {len(done)} of {len(edits)}",
        f"- **tokens per step: {_per_step(predicted):.2f}** over all steps; per edit: mean "
        f"{statistics.fmean(per_edit):.2f}, median {statistics.median(per_edit):.2f}, least "
        f"{min(per_edit):.2f}; {sum(x >= GOAL for x in per_edit)} edits at {GOAL:g} or more",
        f"- tokens/s of {len(compared)} edits: {_rate(plain):.1f} without, {_rate(faster):.1f} with the "
        f"prediction: {_ratio(_rate(faster), _rate(plain)):.2f} times",
        f"- prediction tokens: {predicted['accepted']} accepted, {predicted['rejected']} rejected "
        f"({_ratio(predicted['accepted'], proposed):.0%} of the proposed were accepted)",
        f"- identical texts: {len(compared) - len(differing) + same_text} of {len(compared)}",
        *(
            f"  - {file}, {d['text']}: {'rounding' if d['explained'] else 'NOT EXPLAINED'}"
            for file, d in differing.items()
        ),
        f"- answers that leave the file as it was: {', '.join(copied) or 'none'}",
    ]


def _row(edit: Edit, result: Mapping[str, Any]) -> str:
    plain, predicted, difference = result["plain"], result["predicted"], result["difference"]
    identical = "yes" if difference is None or difference["same_text"] else "no"
    rates = ["", f"{_rate(predicted):.1f}", ""]
    if plain is None:
        identical = ""
    else:
        rates = [f"{_rate(plain):.1f}", rates[1], f"{_ratio(_rate(predicted), _rate(plain)):.2f}"]
    return row(
        edit.file,
        len(edit.source.splitlines()),
        f"-{result['lines_removed']} +{result['lines_added']}",
        predicted["tokens"],
        predicted["finish_reason"],
        *rates,
        f"{_per_step(predicted):.2f}",
        predicted["accepted"],
        predicted["rejected"],
        identical,
    )


def _ask(llm: LLM, edit: Edit, params: SamplingParams) -> RequestOutput:
    [output] = ask(llm, [edit.prompt], params)
    return output


def _side(output: RequestOutput) -> dict[str, Any]:
    figures, timing = output.figures, output.timing
    assert timing.first_token is not None
    assert timing.finished is not None
    assert output.finish_reason is not None
    accepted = figures.accepted_by.get(SPECULATOR, 0)
    return {
        "tokens": len(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "steps": figures.steps,
        "step_tokens": figures.output_tokens,  # without the first, which comes with the prefill
        "seconds": timing.finished - timing.first_token,
        "accepted": accepted,
        "rejected": figures.proposed_by.get(SPECULATOR, 0) - accepted,
    }


def _total(sides: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "steps", "step_tokens", "seconds", "accepted", "rejected")
    return {name: sum(side[name] for side in sides) for name in names}


def _per_step(side: Mapping[str, Any]) -> float:
    return _ratio(side["step_tokens"], side["steps"])


def _rate(side: Mapping[str, Any]) -> float:
    return _ratio(side["step_tokens"], side["seconds"])


def _ratio(a: float, b: float) -> float:
    """Return a / b, or 0 if b is 0, as for an answer of one token."""
    return a / b if b else 0.0


if __name__ == "__main__":
    run(main)
