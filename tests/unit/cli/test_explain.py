"""Steps on the terminal: --explain lists speculators, reasons and costs, and a tree is drawn."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from specinfer.cli.options import build_llm
from specinfer.cli.tree_view import draw_tree
from specinfer.engine.steps import TreeEvent
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree import TreeBuilder
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance
from tests.unit.cli.conftest import Run


def test_explain_lists_speculators_and_reasons_by_step(models: Path, run: Run) -> None:
    arguments = ["generate", "-m", models / "target", "--draft", models / "draft", "--tree-size", "fixed"]
    arguments += ["--no-lookup", "--max-tokens", 9, "--explain", "--n", 2, "abcabc"]
    status, out, err = run(*arguments)
    assert status == 0, err
    assert out.count("guessed (verified of drawn)") == 2
    assert re.search(r"draft (\d+) of \1\b", out), "trees of a fixed size are verified whole"
    assert "draft: no room" in out  # the text's last token
    assert "grammar, prediction: not for this request" in out
    status, out, _ = run(*arguments, "--json")
    answers: list[dict[str, Any]] = json.loads(out)
    for answer in answers:
        steps = answer["steps"]
        assert len(steps) == answer["speculation"]["steps"] + 1
        assert sum(step["tokens"] for step in steps) == 9
        assert {turn["name"] for turn in steps[0]["speculators"]} == {"grammar", "prediction", "draft"}
        assert all(step["seconds"] > 0 and step["expected_tokens"] is None for step in steps)


EXPLAINED = re.compile(
    r"^ *(?P<step>\d+)   (draft (?P<verified>\d) of (?P<drawn>\d))? +(draft: (?P<reason>[a-z ]+?))?"
    r" +(?P<tokens>\d\.\d\d) +(?P<came>\d) +(?P<guesses>\d\.\d) +(?P<expected>\d+\.\d) +(?P<took>\d+\.\d) *$",
    re.MULTILINE,
)


def test_explain_lists_tokens_and_costs(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # A target's pass takes 10 ms, and 1 ms per further row; a draft's pass takes 1 ms.
    of_target, of_draft = CostCurve((1, 101), (0.010, 0.110)), CostCurve((1, 101), (0.001, 0.001))
    curves = {True: of_draft, False: of_target}
    monkeypatch.setattr("specinfer.engine.costs.cost_curve", lambda *_, every_row, **__: curves[every_row])
    monkeypatch.setattr("specinfer.cli.generate.build_llm", partial(build_llm, clock="curve"))
    arguments = ["generate", "-m", models / "target", "--draft", models / "draft"]
    arguments += ["--no-lookup", "--temperature", 0, "--max-tokens", 30, "--explain", "abcabc"]
    status, out, err = run(*arguments)
    assert status == 0, err
    rows = [row.groupdict() for row in EXPLAINED.finditer(out)]
    assert {row["reason"] for row in rows} == {None, "no room", "plain step"}
    counts = f"{len(rows)} steps, including the prompt's, 30 tokens"
    assert re.match(rf"{counts}; \S+ expected; \d+ ms expected, \d+ ms taken; ", out.splitlines()[-1])
    status, out, _ = run(*arguments, "--json")
    steps: list[dict[str, Any]] = json.loads(out)["steps"]
    for row, step in zip(rows, steps, strict=True):
        turn = step["speculators"][-1]
        assert (row["verified"] or "0", row["drawn"] or "0") == (str(turn["verified"]), str(turn["drawn"]))
        assert row["step"] == str(step["step"])
        assert row["tokens"] == f"{step['expected_tokens']:.2f}"
        assert row["came"] == str(step["tokens"])
        assert row["guesses"] == f"{1e3 * step['guess_seconds']:.1f}"
        assert row["expected"] == f"{1e3 * step['expected_seconds']:.1f}"
        assert 1e3 * step["guess_seconds"] == pytest.approx(turn["verified"] + turn["levels"])
        prompt = 5 if step["step"] == 1 else 0  # more rows than one
        assert 1e3 * step["expected_seconds"] == pytest.approx(10 + prompt + 1e3 * step["guess_seconds"])
    assert sum(step["speculators"][-1]["verified"] for step in steps) > 9


WORDS = [" the", " cat", " dog", " sat", ' "ran"\n', " on", " mat"]

DRAWING = r"""
step 3: 2 of 4 accepted
" the"
|-- " cat" (draft, lookup) *
|   |-- " sat" (draft) *
|   |   `=> " on"
|   `-- " \"ran\"\n" (draft)
`-- " dog" (draft)
"""


def event() -> TreeEvent:
    builder = TreeBuilder(root=0)
    cat = builder.add(0, 1, "draft") or 0
    builder.add(0, 2, "draft")
    builder.add(cat, 3, "draft")
    builder.add(cat, 4, "draft")
    builder.add(0, 1, "lookup")
    return TreeEvent(3, "r", builder.build(), Acceptance((1, 3), 5))


def test_a_tree_shows_speculators_and_accepted_nodes() -> None:
    lines = draw_tree(event(), WORDS.__getitem__)
    assert list(map(click.unstyle, lines)) == DRAWING.strip().splitlines()


def test_ordinary_decoding_is_a_tree_of_one_node() -> None:
    lines = draw_tree(TreeEvent(1, "r", single_node(0), Acceptance((), 6)), WORDS.__getitem__)
    assert list(map(click.unstyle, lines)) == ["step 1: no guesses", '" the"', '`=> " mat"']
