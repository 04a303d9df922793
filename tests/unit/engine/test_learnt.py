"""What a policy learns in one engine, and another engine of the same models knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.speculate.policy import policy_memory
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.native_weighing import NativeWeighing
from specinfer.speculate.policy.plain_steps import PlainSteps
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.policy_memory import stored_policies
from tests.engines import ENGINE, engine_of
from tests.kernels import library_or_skip
from tests.tiny_models import write_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _soon(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One outcome is worth keeping, and whatever steps take, everybody may guess in each."""
    monkeypatch.setattr(policy_memory, "LEAST", 1)
    monkeypatch.setattr(Guard, "allows", lambda *_, **__: True)
    monkeypatch.setattr(PlainSteps, "due", lambda *_: False)


def answered(folder: Path, **options: Any) -> str:
    options = {**ENGINE, "kernels": "torch", "tree_size": "cost", "lookup": True, **options}
    with LLM(str(folder / "target"), drafts=(str(folder / "draft"),), **options) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], SamplingParams(temperature=0, max_tokens=60))
    return output.text


def learnt() -> Estimator:
    [(_, stored, why)] = stored_policies()
    assert stored is not None, why
    estimator = Estimator()
    estimator.recall(stored.learned)
    return estimator


def test_what_one_engine_has_learnt_the_next_one_adds_to(folder: Path) -> None:
    first = answered(folder)
    once = learnt().outcomes
    assert once > 0
    assert answered(folder) == first, "texts do not depend on what was learnt"
    assert learnt().outcomes > once


def test_the_file_names_models_and_no_folder(folder: Path) -> None:
    answered(folder)
    [(file, stored, _)] = stored_policies()
    assert stored is not None
    assert stored.key["target"].startswith("target, none, ")
    assert stored.key["drafts"] == ["draft: draft, none, by coupled"]
    assert str(folder) not in file.read_text()


def test_by_the_curves_clock_nothing_is_known_nor_kept(folder: Path) -> None:
    answered(folder, clock="curve")
    assert stored_policies() == []
    answered(folder)
    kept = learnt().outcomes
    options = {**ENGINE, "kernels": "torch", "tree_size": "cost", "clock": "curve"}
    with LLM(str(folder / "target"), drafts=(str(folder / "draft"),), **options) as llm:
        assert engine_of(llm)._memory is None
    assert learnt().outcomes == kept


def test_trees_of_a_fixed_size_learn_nothing(folder: Path) -> None:
    answered(folder, tree_size="fixed")
    assert stored_policies() == []


@pytest.mark.parametrize(("name", "by"), [("native", NativeWeighing), ("torch", PlainWeighing)])
def test_guesses_are_weighed_and_learnt_by_the_kernels_there_are(
    name: str, by: type[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "native":
        library_or_skip()
    asked = set[tuple[type[Any], str]]()

    def noting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any) -> Any:
            asked.add((type(self), ask.__name__))
            return ask(self, *args)

        return noted

    for weighing in (NativeWeighing, PlainWeighing):
        for question in ("expect", "deepen", "choose", "learn"):
            monkeypatch.setattr(weighing, question, noting(getattr(weighing, question)))
    answered(folder, kernels=name)
    assert {weighing for weighing, _ in asked} == {by}
    assert {"expect", "choose", "learn"} <= {
        question for _, question in asked
    }  # seconds say how deep a draft goes
    assert learnt().outcomes > 0
