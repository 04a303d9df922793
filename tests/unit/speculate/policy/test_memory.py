"""Learned figures of a policy across processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy import memory as policy_memory
from specinfer.speculate.policy.acceptance import AcceptanceRates, LevelRate
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import PolicyMemory, read_policy, stored_policies, write_policy
from specinfer.tree import TokenTree, TreeBuilder
from tests.unit.speculate.policy.priced import unlearning

LEAST = 500
KEY = {"target": "large, int8", "drafts": ["draft: small, int8"], "device": "2 x CPU"}
CURVE = CostCurve((1, 2), (1.0, 1.5))
Learned = tuple[AcceptanceRates, Guard]


def guesses() -> TokenTree:
    """Guesses of a draft and of lookup; the latter is accepted."""
    builder = TreeBuilder(9)
    builder.add(0, 10, "draft", confidence=0.8)
    builder.add(0, 11, "lookup", confidence=0.5)
    return builder.build()


def new() -> Learned:
    return AcceptanceRates({"draft": 2}), Guard(unlearning(CURVE), {})


def teach(learned: Learned, outcomes: int = LEAST) -> None:
    """That lookups are right, the draft is for hot texts alone, and plain steps take a tenth more."""
    acceptance, guard = learned
    for _ in range(outcomes // 2):
        acceptance.learn(guesses(), (11, 99), 0.7)
        acceptance.levels["draft"].learn(0, 0, 1.5)
    for _ in range(4):
        guard.begin(["a"], 1, 1, own_size=False)
        guard.observe([], {"target_forward": 1.0, "schedule": 0.1}, [])


def facts(learned: Learned) -> tuple[list[float], list[LevelRate], list[list[LevelRate]], list[float]]:
    acceptance, guard = learned
    draft = acceptance.levels["draft"]
    alike = [draft.rates(heat) for heat in (0.0, 0.3, 1.0, 2.0)]
    multiples = [*guard.plain_steps[1].multiples] if guard.plain_steps else []
    return acceptance.node_rates(guesses()), draft.usual_rates(), alike, multiples


@pytest.fixture(autouse=True)
def _worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_memory, "MIN_OUTCOMES", LEAST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "policies"


@pytest.fixture
def kept(folder: Path) -> Learned:
    """Something learnt, which is in a file."""
    learned = new()
    teach(learned)
    PolicyMemory(KEY, *learned, folder).keep()
    return learned


def the_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def recalled(folder: Path, key: dict[str, Any] = KEY) -> Learned:
    learned = new()
    PolicyMemory(key, *learned, folder).recall()
    return learned


def test_the_next_process_knows_it(folder: Path, kept: Learned, caplog: pytest.LogCaptureFixture) -> None:
    assert facts(recalled(folder)) == facts(kept)
    (_, draft, lookup), _, _, multiples = facts(kept)
    assert draft < 0.2 < 0.7 < lookup
    assert multiples == pytest.approx(4 * [1.1], rel=0.01)
    assert not caplog.records


@pytest.mark.parametrize("changed", ["target", "drafts", "device"])
def test_others_do_not(folder: Path, kept: Learned, changed: str) -> None:
    other = {**KEY, changed: ["another"]}
    assert facts(recalled(folder, other)) == facts(new())


def test_the_file_holds_no_text_and_no_token(folder: Path, kept: Learned) -> None:
    """Names, numbers and switches, all of them known."""
    names = {"version", "key", "learned", "checksum", "target", "drafts", "device", "curves"}
    names |= {"plain", "1", "outcomes", "lookup", "draft", *KEY["drafts"], KEY["target"], KEY["device"]}
    names |= {"all", "alike"}

    def strings(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(strings, value.values()))
        if isinstance(value, list):
            return set().union(*map(strings, value))
        return {value} if isinstance(value, str) else set()

    found = json.loads(the_file(folder).read_text())
    assert strings(found) - {found["checksum"]} <= names
    assert the_file(folder).stat().st_size < 8000


def changed(file: Path, **parts: Any) -> None:
    """Replace parts of a file, and none of the rest."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), "not a complete JSON"),
        (lambda file: file.write_bytes(b""), "not a complete JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "not a complete JSON"),
        (lambda file: file.write_text("[" * 100_000), "not a complete JSON"),
        (lambda file: file.write_text("[1]"), "not a complete JSON"),
        (lambda file: changed(file, version=1), "version 1, expected 7"),
        (lambda file: changed(file, learned={}), "checksum"),
        (lambda file: changed(file, key=[]), "checksum"),
        (lambda file: write_policy(file, {}, read_policy(file).learned), "of other models"),
        (lambda file: (file.unlink(), file.mkdir()), "directory"),
    ],
)
def test_a_file_that_is_spoilt_costs_what_was_learnt_and_one_line(
    folder: Path,
    kept: Learned,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
    reason: str,
) -> None:
    spoil(the_file(folder))
    assert facts(recalled(folder)) == facts(new())
    [line] = caplog.messages
    assert reason in line


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    learned = new()
    memory = PolicyMemory(KEY, *learned, tmp_path / "file" / "policies")
    memory.recall()
    for _ in range(3):
        teach(learned)
        memory.keep()
    [line] = caplog.messages
    assert "cannot be written" in line
    assert facts(learned)[0][2] > 0.8  # it learns all the same


def test_of_two_that_write_one_is_there_whole(folder: Path, kept: Learned) -> None:
    later = new()
    second = PolicyMemory(KEY, *later, folder)
    second.recall()
    teach(later, 2 * LEAST)
    second.keep()
    assert read_policy(the_file(folder)).learned == policy_memory.learned_values(*later)
    assert facts(recalled(folder)) == facts(later)


def test_stored_policies_are_found_and_those_that_cannot_be_used(folder: Path, kept: Learned) -> None:
    (folder / "a.json").write_text("{")
    (first, broken, why), (_, whole, _) = sorted(stored_policies(folder), key=lambda one: one[1] is not None)
    assert (first.name, broken, why) == ("a.json", None, "it is not a complete JSON file")
    assert whole.key == KEY
    assert stored_policies(folder / "nowhere") == []
