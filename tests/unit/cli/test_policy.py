"""`specinfer trace record` and `specinfer policy`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specinfer.cli import cli
from specinfer.engine.steps import Stage
from specinfer.errors import UserError
from specinfer.replay.trace import read_trace, write_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import learned_values, policies_dir, read_policy, write_policy
from specinfer.tree import TreeBuilder
from tests.tiny_models import write_pair

NAMES = ("off", "fixed", "cost", "best-fixed", "oracle")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("12 12 12", "345", "(1,2)")))
    out = folder / "trace.npz"
    done = run(
        *("trace", "record", "--model", folder / "target", "--draft", folder / "draft", "--ngram"),
        *("--prompts", prompts, "--limit", 2, "--max-tokens", 20, "--out", out, "--dtype", "float32"),
        *("--kv-cache-memory", "16MB", "--expansion", "1,1,3,1,1", "--shape", "1,1,3,1,1", "--shape", "4,1"),
    )
    assert done.exit_code == 0, done.output
    assert "2 texts of 40 tokens, 1 drafts" in done.output
    return out


@pytest.fixture(scope="module")
def priced_trace(trace: Path) -> Path:
    """The same at costs that no machine's noise is in: a draft's pass takes a fifth of the target's."""
    read = read_trace(trace)
    target, draft = (CostCurve((1, 8, 64), tuple(scale * s for s in (10, 11, 18))) for scale in (1e-3, 2e-4))
    out = trace.with_name("priced.npz")
    drafts = {name: replace(recorded, curve=draft) for name, recorded in read.drafts.items()}
    write_trace(out, replace(read, curve=target, drafts=drafts, stages={Stage.COMMIT: 1e-4}))
    return out


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_record_prints_the_size_of_the_trace(trace: Path) -> None:
    read = read_trace(trace)
    assert (read.model, list(read.drafts), read.drafts["draft"].model) == ("target", ["draft"], "draft")
    assert [len(text.output) for text in read.texts] == [20, 20]
    assert [text.seed for text in read.texts] == [0, 1]
    assert read.speculation.lookup
    assert (read.likeliest[:, 0] >= read.likeliest[:, 1]).all()
    assert sum(passes for passes, _ in read.drafts["draft"].measured.values()) > 100
    assert b"12 12" not in trace.read_bytes()
    assert str(trace.parent).encode() not in b"".join(
        read_bytes.encode() for read_bytes in (read.model, str(read.speculation), str(read.provenance))
    )


def test_policies_are_compared_on_the_same_texts(priced_trace: Path) -> None:
    first, again = (
        run(
            "policy", "replay", priced_trace, "--json", "--batch", 2, *(f"--policy={n}" for n in NAMES)
        ).output
        for _ in range(2)
    )
    assert first == again
    policies = json.loads(first)["policies"]
    assert list(policies) == list(NAMES)
    assert {played["tokens"] for played in policies.values()} == {40}
    assert policies["off"]["over_none"] == policies["off"]["tokens_per_step"] == 1
    assert policies["fixed"]["tokens_per_step"] > 1
    for played in policies.values():
        low, high = played["over_none_interval"]
        assert low <= played["over_none"] <= high
    assert policies["best-fixed"]["speculators"] in ("draft", "lookup", "draft+lookup")
    assert policies["oracle"]["over_none"] >= max(played["over_none"] for played in policies.values())


def test_a_table_has_a_row_for_each_policy(trace: Path) -> None:
    lines = run("policy", "replay", trace, trace, "--mixed", "--nodes", 4).output.splitlines()
    heads = ["policy", "tokens", "steps", "tokens/step", "seconds", "over", "none", "interval"]
    assert lines[0].split() == heads
    assert [line.split()[:2] for line in lines[1:]] == [["off", "80"], ["fixed", "80"], ["cost", "80"]]


def test_choices_over_time_are_plotted(priced_trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "chosen.svg"
    done = run("policy", "replay", priced_trace, priced_trace, "--policy", "off", "--plot", picture)
    assert done.exit_code == 0, done.output
    assert picture.read_text().startswith("<?xml")
    refused = run("policy", "replay", priced_trace, "--plot", "chosen.gif")
    assert "allowed: a file that ends in .png, .svg or .pdf" in str(refused.exception)


def test_an_invalid_trace_is_refused(trace: Path) -> None:
    refused = run("policy", "replay", trace.with_name("prompts.jsonl"))
    assert isinstance(refused.exception, UserError)
    assert "is not a policy trace" in str(refused.exception)


LEVELS = [[12.0, 2.0, 20.0], [5.0, 0.0, 10.0]]  # first guesses right, others right, tries


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the learned policies of two targets, and a broken file."""
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    acceptance, builder = AcceptanceRates(), TreeBuilder(9)
    builder.add(0, 10, "draft", confidence=0.7)
    builder.add(0, 11, "draft", confidence=0.2)
    for number in range(30):
        acceptance.learn(builder.build(), (10 if number % 3 else 11, 99), 0.0)
    learned = {
        **learned_values(acceptance, Guard(CostModel("target", CostCurve((1, 2), (1.0, 1.5))), {})),
        "drafts": {"draft": {"all": LEVELS, "alike": [LEVELS, [], [], LEVELS[:1]]}},
    }
    for target in ("large, int8", "larger, int8"):
        key = {"target": target, "drafts": ["draft: small, int8"], "device": "2 x CPU"}
        assert write_policy(policies_dir() / f"{target[:6]}.json", key, learned)
    (policies_dir() / "x.json").write_text("{")
    return policies_dir()


def test_learned_figures_are_shown(kept: Path) -> None:
    shown = run("policy", "show").output
    assert shown.count("draft: small, int8") == 2
    assert "target     large, int8" in shown
    assert "learned of 60 guesses" in shown
    assert "draft: accepted at level 1, 2, ... 0.68 0.56\n" in shown
    assert "draft at temperature 0: accepted at level 1, 2, ... 0.68 0.56\n" in shown
    assert "draft at temperatures over 1: accepted at level 1, 2, ... 0.68 0.68\n" in shown
    assert "to 0.5" not in shown, "of which there was none"
    assert re.search(r"draft: first choices, reported->accepted: .* 0\.73->0\.\d\d ", shown)
    assert f"{kept / 'x.json'}\n  cannot be used: it is not a complete JSON file" in shown


def test_learned_figures_are_shown_as_json(kept: Path) -> None:
    shown = json.loads(run("policy", "show", "--json").output)
    assert shown["folder"] == str(kept)
    assert [one.get("error", "") for one in shown["policies"]] == ["", "", "it is not a complete JSON file"]
    assert shown["policies"][0]["learned"]["outcomes"] == 60


def test_a_file_with_a_number_that_cannot_be_is_shown_as_such(kept: Path) -> None:
    for file in kept.glob("larg*.json"):
        stored = read_policy(file)
        write_policy(file, stored.key, {**stored.learned, "outcomes": 1e300})
    assert run("policy", "show").output.count("cannot be used: expected an integer") == 2


def test_learned_figures_of_one_or_all_models_are_deleted(kept: Path) -> None:
    assert run("policy", "reset", "larger").output.count("removed") == 2  # the broken one too
    [file] = kept.iterdir()
    assert read_policy(file).key["target"] == "large, int8"
    assert run("policy", "reset").output == f"removed {file}\n"
    assert run("policy", "reset").output == "nothing to remove\n"
    assert run("policy", "show").output == f"nothing is learned yet; the folder would be {kept}\n"
