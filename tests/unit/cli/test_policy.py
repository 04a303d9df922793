"""`specinfer policy`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specinfer.cli import cli
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import learned_values, policies_dir, write_policy
from specinfer.tree import TreeBuilder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


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
        **learned_values(acceptance, Guard(CostModel(CostCurve((1, 2), (1.0, 1.5))), {})),
        "drafts": {"draft": {"all": LEVELS, "alike": [LEVELS, [], [], LEVELS[:1]]}},
    }
    for target in ("large, int8", "larger, int8"):
        key = {"target": target, "drafts": ["draft: small, int8"], "device": "2 x CPU"}
        assert write_policy(policies_dir() / f"{target[:6]}.json", key, learned)
    (policies_dir() / "x.json").write_text("{")
    return policies_dir()


def test_learned_figures_are_shown(kept: Path) -> None:
    as_json = json.loads(run("policy", "show", "--json").output)
    assert as_json["folder"] == str(kept)
    assert [one.get("error", "") for one in as_json["policies"]] == ["", "", "it is not a complete JSON file"]
    assert as_json["policies"][0]["learned"]["outcomes"] == 60
    shown = run("policy", "show").output
    assert shown.count("draft: small, int8") == 2
    assert "target     large, int8" in shown
    assert "learned of 60 guesses" in shown
    assert "draft: accepted at level 1, 2, ... 0.68 0.56\n" in shown
    assert f"{kept / 'x.json'}\n  cannot be used: it is not a complete JSON file" in shown
    assert run("cache", "clear", "policies").exit_code == 0
    assert run("policy", "show").output == f"nothing is learned yet; the folder would be {kept}\n"
