"""`specinfer cache` and `specinfer policy`: lists of all kept files, and clearing of named ones."""

import json
from pathlib import Path

import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import learned_values, policies_dir, write_policy
from specinfer.tree import TreeBuilder
from tests.unit.cli.conftest import Run


def test_the_cache_is_listed_and_cleared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    status, out, _ = run("cache")
    assert (status, out.splitlines()[0]) == (0, str(tmp_path))
    files = {"prepared/m-int4.safetensors": 2000, "prepared/m-int4.safetensors.lock": 0, "kernels/a.so": 500}
    files |= {"models/tiny/m.gguf": 3000, "models/other/n.gguf": 1000}
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    status, out, _ = run("cache", "list")
    lines = [" ".join(line.split()) for line in out.splitlines()[1:]]
    prepared = "2.0 kB prepared weights in int8 and int4, and for streaming"
    assert lines[:2] == [prepared, "2.0 kB m-int4.safetensors"]
    assert lines[2:5] == ["4.0 kB models downloads", "1.0 kB other", "3.0 kB tiny"]
    status, out, _ = run("cache", "clear", "tiny")
    assert (status, out) == (0, f"removed {tmp_path / 'models' / 'tiny'} (3.0 kB)\n")
    assert run("cache", "clear", "kernels")[0] == 0
    assert not (tmp_path / "kernels").exists()
    assert (tmp_path / "models" / "other" / "n.gguf").exists()
    for words, wrong in (("clear tiny", "the cache has no 'tiny'"), ("list x", "list takes no name")):
        status, _, err = run("cache", *words.split())
        assert (status, wrong in err) == (2, True), err
    assert run("cache", "clear")[0] == 0
    assert [*tmp_path.iterdir()] == []


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
        "drafts": {"draft": {"all": LEVELS, "alike": [LEVELS, LEVELS, LEVELS, LEVELS]}},
    }
    for target in ("large, int8", "larger, int8"):
        key = {"target": target, "drafts": ["draft: small, int8"], "device": "2 x CPU"}
        assert write_policy(policies_dir() / f"{target[:6]}.json", key, learned)
    (policies_dir() / "x.json").write_text("{")
    return policies_dir()


def test_learned_figures_are_shown(kept: Path, run: Run) -> None:
    as_json = json.loads(run("policy", "show", "--json")[1])
    assert as_json["folder"] == str(kept)
    assert [one.get("error", "") for one in as_json["policies"]] == ["", "", "it is not a complete JSON file"]
    assert as_json["policies"][0]["learned"]["outcomes"] == 60
    shown = run("policy", "show")[1]
    assert shown.count("draft: small, int8") == 2
    assert "target     large, int8" in shown
    assert "learned of 60 guesses" in shown
    assert "draft: accepted at level 1, 2, ... 0.68 0.56\n" in shown
    assert f"{kept / 'x.json'}\n  cannot be used: it is not a complete JSON file" in shown
    assert run("cache", "clear", "policies")[0] == 0
    assert run("policy", "show")[1] == f"nothing is learned yet; the folder would be {kept}\n"
