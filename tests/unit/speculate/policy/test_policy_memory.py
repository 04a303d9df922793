"""What a policy has learnt, over the ends of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy import policy_memory
from specinfer.speculate.policy.draft_costs import DraftCosts, LevelOutcome
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.level_counts import LevelCounts, LevelRate, checked_levels
from specinfer.speculate.policy.policy_memory import (
    EVERY,
    LARGEST,
    Learned,
    PolicyMemory,
    read_policy,
    stored_policies,
    write_policy,
)
from specinfer.tree import Draw, DrawRule
from specinfer.tree.expansion import Expansion

LEAST = 500
KEY = {"target": "large, int8", "drafts": ["draft: small, int8"], "device": "2 x CPU"}
CURVE = CostCurve((1, 2), (1.0, 1.5))
BELOW = [
    Draw(0, 1, "draft", DrawRule.POINT_MASS, None, 0.8, (0.8, 0.1)),
    Draw(0, 2, "ngram", DrawRule.POINT_MASS, None, 0.5, (1.0,)),
]


def new() -> Learned:
    costs = CostModel("draft", CURVE, learns=False)
    return Learned(Estimator(), {"draft": DraftCosts(costs, Expansion((1, 1)))})


def teach(learned: Learned, outcomes: int = LEAST) -> None:
    """That n-grams are right, and the draft never is."""
    for _ in range(outcomes // len(BELOW)):
        learned.estimator.learn(BELOW, 2, 0.0)
        learned.drafts["draft"].learn(LevelOutcome("a", 0, None), 0.7)
        learned.drafts["draft"].learn(LevelOutcome("b", 0, 0), 1.5)


def facts(learned: Learned) -> tuple[list[float], list[LevelRate], list[LevelRate]]:
    draft = learned.drafts["draft"]
    alike = [draft.rate(0, temperature=heat) for heat in (0.0, 0.3, 1.0, 2.0)]
    return learned.estimator.rates(BELOW, 0.0), [*draft.rates()], alike


@pytest.fixture(autouse=True)
def _worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_memory, "LEAST", LEAST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "policies"


@pytest.fixture
def kept(folder: Path) -> Learned:
    """Something learnt, which is in a file."""
    learned = new()
    teach(learned)
    PolicyMemory(KEY, learned, folder).keep()
    return learned


def the_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def recalled(folder: Path, key: dict[str, Any] = KEY) -> Learned:
    learned = new()
    PolicyMemory(key, learned, folder).recall()
    return learned


def test_the_next_process_knows_what_this_one_has_learnt(
    folder: Path, kept: Learned, caplog: pytest.LogCaptureFixture
) -> None:
    assert facts(recalled(folder)) == facts(kept)
    assert facts(kept)[0][0] < 0.1 < 0.9 < facts(kept)[0][1]
    assert not caplog.records


@pytest.mark.parametrize("changed", ["target", "drafts", "device"])
def test_others_do_not(folder: Path, kept: Learned, changed: str) -> None:
    other = {**KEY, changed: ["another"]}
    assert facts(recalled(folder, other)) == facts(new())


def test_the_file_holds_no_text_and_no_token(folder: Path, kept: Learned) -> None:
    """Names, numbers and switches, all of them known."""
    names = {"version", "key", "learned", "checksum", "target", "drafts", "device", "counts", "logistics"}
    names |= {"weights", "lead", "outcomes", "ngram", "draft", *KEY["drafts"], KEY["target"], KEY["device"]}
    names |= {"all", "alike"}
    names |= set(kept.estimator.rivals["draft"].logistic.named())

    def strings(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(strings, value.values()))
        if isinstance(value, list):
            return set().union(*map(strings, value))
        return {value} if isinstance(value, str) else set()

    found = json.loads(the_file(folder).read_text())
    assert strings(found) - {found["checksum"]} <= names
    assert the_file(folder).stat().st_size < 8000


def changed(file: Path, change: Callable[[dict[str, Any]], None], *, signed: bool = True) -> None:
    """Change the JSON of a file, with a checksum that is right again if `signed`."""
    found = json.loads(file.read_text())
    change(found)
    if signed:
        assert write_policy(file, found["key"], found["learned"])
    else:
        file.write_text(json.dumps(found))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        place: Any = found["learned"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def test_counts_as_they_fade_are_ones_that_can_be() -> None:
    for choices in product((0, 1, None), repeat=6):
        counts = LevelCounts(1)
        for choice in choices:
            counts.learn(0, choice)
        told = counts.to_json()
        [[firsts, others, tries]] = checked_levels(told)
        assert [firsts, others, tries] == pytest.approx(told[0]), choices
        assert others <= tries - firsts, choices


def test_more_right_guesses_than_tries_cannot_be() -> None:
    with pytest.raises(ValueError, match="stands where 0 to 1 is allowed"):
        checked_levels([[1.0, 1.0001, 2.0]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("logistics", "draft", "weights", "agreed", value=1e300), "1e+300 stands where -16 to 16"),
        (put("logistics", "draft", "weights", "agreed", value=float("nan")), "nan stands where"),
        (put("logistics", "draft", "weights", value={}), "weights of"),
        (put("logistics", "draft", "lead", value=1e300), "1e+300 stands where"),
        (put("logistics", "draft", "outcomes", value=-1), "-1 stands where"),
        (put("logistics", "draft", value={}), "lacks 'weights'"),
        (put("logistics", value=[]), "stands where an object"),
        (put("logistics", value={str(n): {} for n in range(300)}), "300 logistics"),
        (put("logistics", "draft", value=3), "3 stands where an object"),
        (put("counts", 0, 3, value=1e300), "1e+300 stands where"),
        (put("counts", 0, 4, value=float("inf")), "inf stands where"),
        (put("counts", 0, 1, value=99), "99 stands where"),
        (put("counts", 0, 0, value="x" * 1000), "a speculator's name"),
        (put("counts", 0, value=[1, 2]), "a list of 5"),
        (put("counts", value=[0] * 9999), "a list of at most"),
        (put("counts", value=None), "None stands where"),
        (put("drafts", "draft", "all", 0, value=[5.0, 0.0, 1.0]), "5.0 stands where 0 to 1"),
        (put("drafts", "draft", "alike", 3, 0, value=[5.0, 0.0, 1.0]), "5.0 stands where 0 to 1"),
        (put("drafts", "draft", "alike", value=[[]]), "stands where a list of 4"),
        (put("drafts", "draft", value=7), "7 stands where"),
        (put("drafts", value=7), "7 stands where an object"),
        (put("outcomes", value=1e300), "1e+300 stands where"),
    ],
)
def test_a_number_that_cannot_be_costs_what_was_learnt_and_one_line(
    folder: Path,
    kept: Learned,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    changed(the_file(folder), change)
    assert facts(recalled(folder)) == facts(new())  # nothing of it, not even what could be
    [line] = caplog.messages
    assert reason in line
    assert str(the_file(folder)) in line


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), "no whole JSON"),
        (lambda file: file.write_bytes(b""), "no whole JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "no whole JSON"),
        (lambda file: file.write_text("[" * 100_000), "no whole JSON"),
        (lambda file: file.write_text("[1]"), "an object"),
        (lambda file: file.write_text(" " * (LARGEST + 1)), "more than"),
        (lambda file: changed(file, lambda j: j.update(version=1), signed=False), "version 1, not 4"),
        (lambda file: changed(file, put("drafts", value={}), signed=False), "checksum"),
        (lambda file: changed(file, lambda j: j["key"].update(target="else")), "of other models"),
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
    memory = PolicyMemory(KEY, learned, tmp_path / "file" / "policies")
    memory.recall()
    for _ in range(3):
        teach(learned)
        memory.keep()
    [line] = caplog.messages
    assert "cannot be written" in line
    assert facts(learned)[0][1] > 0.9  # it learns all the same


def test_a_little_is_not_worth_keeping(folder: Path) -> None:
    learned = new()
    teach(learned, LEAST - 2)
    PolicyMemory(KEY, learned, folder).keep()
    assert not folder.exists()


def test_it_is_kept_every_some_steps(folder: Path) -> None:
    learned = new()
    memory = PolicyMemory(KEY, learned, folder)
    teach(learned)
    for _ in range(EVERY - 1):
        memory.stepped()
    assert not folder.exists()
    memory.stepped()
    assert facts(recalled(folder)) == facts(learned)


def test_of_two_that_write_one_is_there_whole(folder: Path, kept: Learned) -> None:
    later = new()
    second = PolicyMemory(KEY, later, folder)
    second.recall()
    teach(later, 2 * LEAST)
    second.keep()
    assert read_policy(the_file(folder)).learned == later.to_json()
    assert facts(recalled(folder)) == facts(later)


def test_fewer_levels_than_a_draft_has_are_taken(folder: Path, kept: Learned) -> None:
    changed(the_file(folder), put("drafts", "draft", "all", value=[[1.0, 2.0, 50.0]]))
    learned = recalled(folder)
    rate, first = learned.drafts["draft"].rates()[0], (1 + 3 * 0.7) / 53
    assert rate == pytest.approx((first, (1 - first) * 2 / 52))


def test_stored_policies_are_found_and_those_that_cannot_be_used(folder: Path, kept: Learned) -> None:
    (folder / "a.json").write_text("{")
    (first, broken, why), (_, whole, _) = sorted(stored_policies(folder), key=lambda one: one[1] is not None)
    assert (first.name, broken, why) == ("a.json", None, "it is no whole JSON file")
    assert whole is not None
    assert whole.key == KEY
    assert stored_policies(folder / "nowhere") == []
