"""`specinfer bench`, `check` and `tune` from options to figures, exit statuses and heads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specinfer.check import parameters
from specinfer.engine import engine
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from specinfer.tree import TokenTree
from specinfer.verify.coupled import Acceptance
from tests.flights import choose, each_tree
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.conftest import Run

SHORT = ("--max-tokens", 6)


def test_table_and_file(pair: list[str], run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    status, printed, err = run("bench", *pair, *SHORT, "--limit", 3, "--json", out)
    assert status == 0, err
    result = json.loads(out.read_text())
    assert f"speedup: {result['speedup']:.2f}x" in printed
    assert "without speculation" in printed
    assert "identical texts: 3 of 3" in printed
    assert (result["requests"], result["dataset"]["name"]) == (3, "built-in")
    assert result["options"]["chat"] is False
    assert result["command"]


def test_a_data_set_sampled_in_a_batch_and_printed_as_json(pair: list[str], run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"prompt": "a"}\n')
    sampling = ("--temperature", 1, "--seed", 3, "--batch-size", 2, "--json", "-")
    status, printed, err = run("bench", *pair, *SHORT, "--dataset", rows, *sampling)
    assert status == 0, err
    result = json.loads(printed)
    assert (result["requests"], result["identical"]) == (3, 3)
    assert result["dataset"]["duplicates_dropped"] == 1
    assert result["options"]["scheduler"]["max_batch_size"] == 2
    assert result["options"]["sampling"]["seed"] == 3


def test_invalid_comparisons_are_refused(pair: list[str], run: Run, tmp_path: Path) -> None:
    for options, message in (
        ([*pair[:2], "--no-lookup", "--kv-cache-memory", "64MB"], "speculation is off"),
        ([*pair, "--batch-size", 0], "'--batch-size': 0"),
        ([*pair, "--dataset", tmp_path / "none.jsonl"], "cannot read the data set"),
        ([*pair, "--json", tmp_path / "none" / "out.json"], "there is no folder"),
    ):
        status, _, err = run("bench", *options)
        assert status == 2, options
        assert message in err, options


SUITE = ("check", "--prompts", 3, "--max-tokens", 12, "--samples", 24)


@pytest.mark.slow
def test_it_passes_in_words_and_in_json(pair: list[str], run: Run, tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    status, printed, err = run(*SUITE, *pair, "--json", out)
    assert status == 0, err
    assert "passed: all 13 checks; the output is the target's" in printed
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert [verdict["passed"] for verdict in report["verdicts"]] == [True] * 13
    assert report["verdicts"][0]["texts"] == 3
    assert report["verdicts"][8]["p_value"] > 1e-4


@pytest.mark.thorough
def test_a_broken_promise_is_status_1_and_says_where(
    pair: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_the_first_guess(tree: TokenTree, laws: Any, verifier: Any) -> Acceptance:
        path = (1,) if tree.num_nodes > 1 else ()
        return Acceptance(path, choose(laws, path[-1] if path else 0))

    monkeypatch.setattr(engine, "verify_trees", each_tree(accept_the_first_guess))
    out = tmp_path / "check.json"
    stranger = Path(pair[1]).parent / "stranger"
    status, printed, _ = run(*SUITE, *pair[:2], "--draft", stranger, *pair[4:], "--json", out)
    assert status == 1
    assert "FAIL  greedy, with and without speculation: " in printed
    assert "3 differ, rounding explains 0 of them; text 1, at output token" in printed
    assert "below 0.0001, so this is not the target's law" in printed
    assert "the output is not the target's alone" in printed
    assert json.loads(out.read_text())["passed"] is False


def test_parameters_suite(pair: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, all_of = ("repetition_penalty, greedy", "choice"), parameters.settings_for
    monkeypatch.setattr(parameters, "settings_for", lambda *args: {one: all_of(*args)[one] for one in few})
    out = tmp_path / "check.json"
    options = ("--suite", "parameters", "--prompts", 2, "--max-tokens", 40, "--json", out)
    _, printed, _ = run("check", *pair, *options)
    assert "pass  repetition_penalty, greedy: 2 of 2 texts identical" in printed
    assert json.loads(out.read_text())["suite"] == "parameters"
    # The tiny model names no token that ends a text, which a setting with a form needs.
    assert "open: 1 of 3 checks saw too little to say" in printed


def test_invalid_checks_are_refused(pair: list[str], run: Run) -> None:
    for options, refusal in (
        ("--max-tokens 2", "--max-tokens is 2"),
        ("--prompts 1000", "--prompts is 1000; there are 26"),
        ("--suite parameters --samples 9", "--samples is for the suite promise, not for parameters"),
        ("--suite parameters --max-tokens 39", "is 39; allowed: an integer >= 40, as min_tokens"),
    ):
        status, _, err = run("check", *pair, *options.split())
        assert (status, refusal in err) == (2, True), err


SMALL = "--dtype float32 --kv-cache-memory 16MB --max-context 64 --max-tokens 8 --raw"


@pytest.mark.thorough
def test_a_head_from_traffic_and_then_from_more_minutes(tmp_path: Path, run: Run) -> None:
    target = write_tiny_llama(tmp_path / "target", num_layers=3, tokenizer=True)
    log = tmp_path / "traffic.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [n, n + 1]}) + "\n" for n in range(20)) + "bad\n")
    out = tmp_path / "head"
    options = ["tune", "--model", str(target), "--out", str(out), "--traffic", str(log), *SMALL.split()]
    options += ["--vocabulary", "32", "--depth", "3", "--minutes"]
    mistyped = [option.replace("traffic.jsonl", "trafic.jsonl") for option in options]
    assert run(*mistyped, 0.01)[0] == 2
    assert not out.exists(), "the folder is free for the corrected command"
    status, printed, err = run(*options, 0.01)
    assert status == 0, err
    assert f"skipped: {log} line 21: not JSON" in printed + err
    report = rf"{out}: .* held-out positions; it (pays|does not pay) on this machine "
    report += rf"\((.*) tokens/s expected with it, (.*) without: .* times\); .*--draft {out}"
    match = re.search(report, printed)
    assert match
    assert (match[1] == "pays") is (float(match[2]) > float(match[3]))
    assert "ms for one token" in err
    assert f"It {match[1]} on this machine" in (out / "README.md").read_text()
    head = HeadFolder(out, open_model(target).config)
    assert (head.config.depth, head.config.draft_vocab_size) == (3, 32)
    status, _, err = run(*options, 0.02, "--resume")
    assert status == 0, err


def test_options_that_exclude_each_other_are_refused(tmp_path: Path, run: Run) -> None:
    for words, options in {
        "both given": ("--prompts", "a", "--traffic", "b"),
        "vocabulary is 64 with kind ssm": ("--kind", "ssm", "--vocabulary", "64"),
        "layers is 5 with kind ssm; allowed: 1 to 4": ("--kind", "ssm", "--layers", "5"),
    }.items():
        status, _, err = run("tune", "--out", tmp_path / "out", *options)
        assert (status, words in err) == (2, True), err
    assert not (tmp_path / "out").exists()
