"""Scripts from options to page, on tiny models; each goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.replay.trace import Trace
from specinfer import LLM, SamplingParams
from specinfer.engine.steps import Stage
from specinfer.errors import UserError
from specinfer.runtime.cost_curve import CostCurve
from tests.unit.benchmarks.conftest import Run

Script = Callable[[str], ModuleType]


def table(page: list[str]) -> list[list[str]]:
    """The cells of the rows below a table's head, of the first table."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("|")]
    return rows[2:]


@pytest.fixture
def run_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script as `run` does, where everything was measured: it loads no model."""

    def refuse(*args: Any, **options: Any) -> LLM:
        raise AssertionError("a model is loaded although everything was measured")

    def main(module: ModuleType, *options: str, status: int | None = None) -> list[str]:
        monkeypatch.setattr(module, "LLM", refuse)
        return run(module, *options, status=status)

    return main


def test_identity(script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str) -> None:
    module = script("identity")
    options = ["--model", pair[0], "--draft", pair[1], "--dataset", dataset, "--max-tokens", "12"]
    page = run(module, *options, status=0)
    assert "- identical texts: 3 of 3" in page
    [[name, prompts, same, again, per_step]] = table(page)
    assert (name, prompts, same, again) == ("rows.jsonl", "3", "3", "3")
    assert float(per_step) > 1
    assert run_again(module, *options, status=0) == page


def test_identity_fails_where_a_difference_is_not_explained(
    script: Script, run: Run, pair: tuple[str, str], dataset: str, tmp_path: Path
) -> None:
    module = script("identity")
    options = ["--model", pair[0], "--ngram", "--dataset", dataset, "--no-repeat", "--max-tokens", "4"]
    run(module, *options, status=0)
    file = tmp_path / "page.json"
    kept = json.loads(file.read_text())
    kept["cells"]["rows.jsonl"]["differences"] = [
        {"text": "prompt 0, a", "explained": True},
        {"text": "prompt 2, b", "explained": False},
    ]
    file.write_text(json.dumps(kept))
    page = run(module, *options, status=1)
    assert "- identical texts: 1 of 3" in page
    assert page[page.index("- different texts, not explained: 1") + 1] == "  - rows.jsonl prompt 2, b"
    assert table(page)[0][3] == "not run"


@pytest.mark.thorough
def test_parameters(
    script: Script, run: Run, pair: tuple[str, str], dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("parameters")
    everything = module.settings_for
    few = ("presence_penalty", "min_tokens", "choice")
    monkeypatch.setattr(module, "settings_for", lambda *args: {name: everything(*args)[name] for name in few})
    options = ["--model", pair[0], "--dataset", dataset, "--max-tokens", "40"]
    page = run(module, *options, status=0)
    assert "- identical texts: 9 of 9; least in one setting: 3 of 3 (presence_penalty)" in page
    rows = table(page)
    assert [row[:4] for row in rows] == [[name, "3 of 3", "0", "0"] for name in few]
    assert all(float(row[6].strip("%")) > 0 for row in rows)
    assert all(float(row[7]) > 0 for row in rows), "rows were counted"
    # Another setting under a known name is measured again, the others are not.
    monkeypatch.setattr(
        module,
        "settings_for",
        lambda *args: {**{name: everything(*args)[name] for name in few}, "choice": {"choice": ["a"]}},
    )
    again = table(run(module, *options, status=0))
    assert again[:2] == rows[:2]
    assert again[2] != rows[2]


def test_overhead(script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str) -> None:
    module = script("overhead")
    options = ["--model", pair[0], "--dataset", dataset, "--limit", "3", "--max-tokens", "8"]
    page = run(module, *options)
    rows = table(page)
    assert [row[0] for row in rows] == [
        f"{load}, {guessing}"
        for load in ("batch 1, greedy", "batch 8, sampling, penalties")
        for guessing in ("none", "lookups")
    ]
    for row in rows:
        shares = [float(share.rstrip("%")) for share in row[4:]]
        assert sum(shares[:-1]) == pytest.approx(100, abs=0.5), "stages and what is outside are all there is"
        assert 100 - shares[2] == pytest.approx(shares[-1], abs=0.11)
    assert [row[2] for row in rows[::2]] == ["1.00", "1.00"]
    assert run_again(module, *options) == page


def test_deciding(script: Script, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("deciding")
    for name, fewer in (("PROMPT", 60), ("ANSWER", 80), ("SKIPPED", 1)):
        monkeypatch.setattr(module, name, fewer)
    page = run(module, "--rounds", "1", "--twins")
    head = [cell.strip() for cell in page[2].strip("|").split("|")]
    assert head[:5] == ["requests", "a draft", "steps", "nodes of a tree", "tokens of a step"]
    rows = [dict(zip(head, row, strict=True)) for row in table(page)]
    cells = [(count, draft) for draft in ("by levels", "in one pass", "none") for count in ("1", "8")]
    assert [(row["requests"], row["a draft"]) for row in rows] == cells
    for row in rows:
        assert float(row["nodes of a tree"]) > 1
        assert all(float(row[part]) > 0 for part in ("deciding", "merging", "lookup"))
        assert (float(row["draft"]) > 0) is (row["a draft"] == "by levels")
        if row["a draft"] != "none":
            assert float(row["tokens of a step"]) > 1.2, "guesses became text"
        both = float(row["deciding"]) + float(row["merging"])
        assert float(row["deciding and merging"]) == pytest.approx(both, abs=1)


def test_structured(script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str) -> None:
    module = script("structured")
    options = ["--model", pair[0], "--questions", dataset, "--limit", "2", "--max-tokens", "40"]
    page = run(module, *options, status=0)
    rows = table(page)
    assert [row[0] for row in rows] == ["our schemas", "rows.jsonl"]
    for _, requests, valid, cut, broken, same, _, _ in rows:
        assert (requests, int(valid) + int(cut), broken, same) == ("2", 2, "0", "2")
    guessed, right = rows[1][-1].split(", ")
    assert int(guessed) >= int(right) > 0  # keys, which the schema forces
    assert run_again(module, *options, status=0) == page


def test_table2(script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str) -> None:
    module = script("table2")
    options = ["--model", pair[0], "--draft", pair[1], "--dataset", f"piqa={dataset}", "--max-tokens", "8"]
    few = run(module, *options, "--widths", "2", "--modes", "greedy,T=1 mss")
    more = run(module, *options, "--widths", "2,1", "--modes", "greedy")
    greedy, mss, paper, _ = table(more)
    assert table(few)[0][4] == greedy[4]
    assert table(few)[1] == mss
    assert [bool(cell) for cell in greedy[3:]] == [True, True, False, False, False]
    assert all(float(cell) > 1 for cell in greedy[3:5])
    assert paper == ["piqa", "paper, greedy", "", "2.18", "2.80", "2.97", "3.10", "3.21"]
    assert run_again(module, *options, "--widths", "1", "--modes", "greedy") == more


def test_tree_nodes(script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str) -> None:
    module = script("tree_nodes")
    options = ["--model", pair[0], "--draft", pair[1], "--dataset", dataset, "--max-tokens", "12"]
    page = run(module, *options)
    plain, by_cost, *shaped = table(page)
    assert (plain[:4], plain[5]) == (["none", "nothing", "0.0", "1.00"], "1.00")
    assert [one[1] for one in shaped] == [*map(str, module.SHAPES)]
    assert [shape.num_nodes - 1 for shape in module.SHAPES] == [8, 16, 28, 64, 128]
    assert by_cost[1] == "by cost"
    nodes, tokens, kv = ([float(one[i]) for one in shaped] for i in (2, 3, 6))
    assert sorted(nodes) == nodes
    assert 2 < 4 * nodes[0] < nodes[-1]
    assert min(tokens) > 1
    assert sorted(kv) == kv
    assert all(float(one[4]) > 0 for one in (plain, *shaped, by_cost))
    assert run_again(module, *options) == page


def test_tree_nodes_reads_the_most_memory_and_lets_it_begin_anew(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("tree_nodes")
    monkeypatch.setattr(module, "PROCESS", tmp_path)
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n")
    assert module.forget_peak() == module.peak() == 2 << 20
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_tree_nodes_goes_on_where_nobody_tells_of_memory(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("tree_nodes")
    monkeypatch.setattr(module, "PROCESS", tmp_path / "none")
    assert module.forget_peak() == 0
    monkeypatch.setattr(module, "PROCESS", tmp_path)
    (tmp_path / "status").write_text("Name: python\n")
    assert module.forget_peak() == 0


def test_prediction(
    script: Script, run: Run, run_again: Run, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("prediction")
    monkeypatch.setattr(module, "LONGEST_PROMPT", 3000)  # a token is a byte
    options = ["--model", pair[0], "--limit", "2", "--plain", "1", "--max-tokens", "6"]
    page = run(module, *options, status=0)
    assert "- edits: 2 of 2" in page
    assert "- identical texts: 1 of 1" in page
    compared, alone = table(page)
    assert compared[-1] == "yes"
    assert alone[-1] == ""
    assert run_again(module, *options, status=0) == page


@pytest.mark.thorough
def test_policy_traces(
    script: Script, run: Run, run_again: Run, pair: tuple[str, str], dataset: str, tmp_path: Path
) -> None:
    module = script("policy_traces")
    options = ["--model", pair[0], "--draft", pair[1], "--texts", "2", "--max-tokens", "8"]
    options += ["--traces", str(tmp_path / "traces")]
    for kind in ("chat", "code", "maths"):
        options += [f"--{kind}", dataset]
    short = [replace(edit, source=edit.source[:200]) for edit in module.read_edits()]
    target, draft = (CostCurve((1, 8, 64), tuple(scale * s for s in (10, 11, 18))) for scale in (1e-3, 2e-4))
    record = module.record

    def priced(*args: Any, **options: Any) -> Trace:
        """A trace at costs that no machine's noise is in."""
        trace = record(*args, **options)
        drafts = {name: replace(recorded, curve=draft) for name, recorded in trace.drafts.items()}
        return replace(trace, curve=target, drafts=drafts, stages={Stage.COMMIT: 1e-4})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_edits", lambda: short)
        patch.setattr(module, "record", priced)
        page = run(module, *options)
        rows = table(page)
        kinds = ["chat", "code", "maths", "edits", "repeats", "adversarial"]
        names = [*kinds, "mixed", "phases", "ramp", "neighbour"]
        heads = ("workload", "---")
        speeds, others = (
            [row for row in rows if len(row) == columns and row[0] not in heads] for columns in (8, 5)
        )
        bests, choices = others[: len(names)], others[len(names) :]
        assert [[row[0] for row in of_table] for of_table in (speeds, bests, choices)] == [names] * 3
        ratios = {row[0]: [float(cell.split()[0]) for cell in row[4:]] for row in speeds}
        for name, (fixed, cost, best, oracle) in ratios.items():
            assert name == "neighbour" or oracle >= 0.98 * max(fixed, cost, best), name
        for name, over, *_ in bests:
            assert float(over.split()[0]) == pytest.approx(ratios[name][1] / ratios[name][2], rel=5e-3)
        assert all(float(row[1]) >= 1 for row in choices), "tokens of a step"
        files = sorted(file.name for file in (tmp_path / "traces").iterdir())
        assert files == sorted(f"{kind}-00.npz" for kind in kinds)
        assert run_again(module, *options) == page


def test_policy_live(
    script: Script,
    run: Run,
    run_again: Run,
    pair: tuple[str, str],
    dataset: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = script("policy_live")
    options = ["--model", pair[0], "--draft", pair[1], "--texts", "1", "--max-tokens", "8"]
    for kind in ("chat", "code", "maths"):
        options += [f"--{kind}", dataset]
    everything = module.questions_of

    def short(*given: Any) -> dict[str, list[Any]]:
        """The questions, of three kinds, those of edits cut."""
        found = everything(*given)
        edits = [replace(one, prompt=str(one.prompt)[:200]) for one in found["edits"]]
        return {"chat": found["chat"], "edits": edits, "adversarial": found["adversarial"]}

    monkeypatch.setattr(module, "questions_of", short)
    page = run(module, *options)
    rows = table(page)
    assert [row[0] for row in rows] == ["chat", "edits", "adversarial"]
    for _, texts, tokens, rate, *ratios, beside in rows:
        assert (texts, tokens) == ("1", "8")
        assert float(rate) > 0
        assert len(ratios) == 4
        assert all(float(cell.split("(")[1][:-1]) >= 1 for cell in ratios), "tokens a step"
        assert beside.endswith(("(lookup)", "(lookups)", "(draft)"))
    assert run_again(module, *options) == page

    tokens = iter(range(2))
    monkeypatch.setattr(module, "answer", lambda *_, **__: SimpleNamespace(token_ids=[next(tokens)]))
    questions = [module.Question("?", SamplingParams(temperature=0))]
    with pytest.raises(UserError, match="text 0 is another one in some way"):
        module.measured(dict.fromkeys(("none", "all")), questions)


def test_grammar(
    script: Script, run: Run, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("grammar")
    schemas = tmp_path / "schemas.json"
    schemas.write_text(json.dumps([{"name": "short", "schema": {"enum": ["red", "green"]}}]))
    monkeypatch.setattr(module, "SCHEMAS", schemas)
    page = run(module, "--model", pair[0])
    assert page[0] == "# The cost of a grammar: 1 schemas, vocabulary of 256 (target)"
    rows = {row[0]: row[1:] for row in table(page)}
    assert rows["mask, first request"][-1] == rows["mask, second request"][-1]
    assert all(float(value) > 0 for value in rows["compile and try a new schema"][:4])


@pytest.mark.thorough
def test_boosting(
    script: Script, run: Run, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("boosting")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} * {n}"}) + "\n" for n in range(40)))
    options = ["--model", pair[0], "--prompts", str(prompts), "--work", str(tmp_path / "work")]
    options += ["--minutes", "0.02", "--collect-minutes", "0.01", "--members", "2", "--depth", "2"]
    options += ["--layers", "1", "--max-answer", "16"]
    every = module.variants(1, 2, 2)
    assert [*every] == [
        *("1 ssm", "1 block", *(f"2 ssm, {form}" for form in ("none", "sequence", "discount"))),
        *(f"2 ssm, {form}, warm" for form in ("none", "discount")),
        *("4 ssm, sequence", "1 ssm of 2 layers", "1 eagle"),
        "1 block, loss kl",
        *(f"2 block, {form}" for form in ("none", "sequence", "discount", "none, warm", "discount, warm")),
    ]
    names = ["1 ssm", "2 ssm, discount", "1 block, loss kl"]
    options += [word for name in names for word in ("--only", name)]
    page = run(module, *options)
    rows = table(page)
    counted, timed = rows[: len(names)], rows[-len(names) :]
    assert [row[0] for row in counted] == names
    for name, steps, _, own, pool, wide, _, second in counted:
        members = int(name[0])
        assert len(steps.split()) == len(own.split()) == len(pool.split()) == members
        assert float(pool.split()[-1]) >= max(map(float, own.split())) >= 1
        assert float(wide) >= float(own.split()[0])
        assert bool(second) is (members > 1)
    weights = {row[0]: float(row[2]) for row in counted}
    assert weights["2 ssm, discount"] > weights["1 ssm"] > 0
    assert [row[0] for row in timed] == names
    assert all(len(row[1].split()) == int(row[0][0]) for row in timed)
    assert any(line.startswith("![") for line in page) is (find_spec("matplotlib") is not None)

    def refuse(*_: Any) -> None:
        raise AssertionError("answers are collected although they are there")

    monkeypatch.setattr(module.Tuning, "collect", refuse)
    assert run(module, *options) == page
    with pytest.raises(SystemExit, match="got --only '9 ssm'; allowed: '1 ssm', '1 block', '2 ssm, none'"):
        run(module, *options, "--only", "9 ssm")
