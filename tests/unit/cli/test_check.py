"""`specinfer check` from options to exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specinfer.check import parameters
from specinfer.cli.check import check
from specinfer.engine import engine
from specinfer.errors import ConfigError, RequestError
from specinfer.tree import TokenTree
from specinfer.verify.coupled import Acceptance
from tests.flights import choose, each_tree


def run(*arguments: str) -> Result:
    small = ("--prompts", "3", "--max-tokens", "12", "--samples", "24")
    return CliRunner().invoke(check, [*small, *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_it_passes_in_words_and_in_json(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    result = run(*pair, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "passed: all 13 checks; the output is the target's" in result.stdout
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert len(report["verdicts"]) == 13
    assert all(verdict["passed"] for verdict in report["verdicts"])
    assert report["verdicts"][0]["texts"] == 3
    assert report["verdicts"][8]["p_value"] > 1e-4


@pytest.mark.thorough
def test_a_broken_promise_is_status_1_and_says_where(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_the_first_guess(tree: TokenTree, laws: Any, verifier: Any) -> Acceptance:
        path = (1,) if tree.num_nodes > 1 else ()
        return Acceptance(path, choose(laws, path[-1] if path else 0))

    monkeypatch.setattr(engine, "verify_trees", each_tree(accept_the_first_guess))
    out = tmp_path / "check.json"
    stranger = str(Path(pair[1]).parent / "stranger")
    result = run(*pair[:2], "--draft", stranger, *pair[4:], "--json", str(out))
    assert result.exit_code == 1
    assert "FAIL  greedy, with and without speculation: " in result.stdout
    assert "3 differ, rounding explains 0 of them; text 1, at output token" in result.stdout
    assert "below 0.0001, so this is not the target's law" in result.stdout
    assert "the output is not the target's alone" in result.stdout
    assert json.loads(out.read_text())["passed"] is False


def test_the_suite_of_parameters(pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = parameters.settings_for
    few = ("repetition_penalty, greedy", "choice")
    monkeypatch.setattr(
        parameters, "settings_for", lambda *args: {name: everything(*args)[name] for name in few}
    )
    out = tmp_path / "check.json"
    options = ("--suite", "parameters", "--prompts", "2", "--max-tokens", "40", "--json", str(out))
    result = CliRunner().invoke(check, [*pair, *options], catch_exceptions=False)
    assert "pass  repetition_penalty, greedy: 2 of 2 texts identical" in result.stdout
    assert json.loads(out.read_text())["suite"] == "parameters"
    # The tiny model names no token that ends a text, which a setting with a form needs.
    assert "open: 1 of 3 checks saw too little to say" in result.stdout


def test_invalid_checks_are_refused(pair: list[str]) -> None:
    for options, refusal in (
        ("--max-tokens 2", "--max-tokens is 2"),
        ("--prompts 1000", "--prompts is 1000; there are 26"),
        ("--suite parameters --samples 9", "--samples is for the suite promise, not for parameters"),
        (
            "--suite parameters --max-tokens 39",
            "--max-tokens is 39; allowed: an integer >= 40, as min_tokens",
        ),
    ):
        with pytest.raises((ConfigError, RequestError), match=refusal):
            pytest.fail(
                f"{options}: {CliRunner().invoke(check, [*pair, *options.split()], catch_exceptions=False)}"
            )
