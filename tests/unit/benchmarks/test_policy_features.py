"""Other features of guesses, weighed along traces."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specinfer.tree import Draw, DrawRule
from tests.unit.benchmarks.conftest import Run

Script = Callable[[str], ModuleType]
# Two texts with a prompt of three tokens each; the target was sure of the first token, by half of the second.
TRACE = SimpleNamespace(
    texts=[SimpleNamespace(prompt=(1, 2, 3))] * 2,
    starts=[0, 2, 4],
    likeliest=np.log(np.array([[1.0, 1e-9], [0.5, 0.3], [math.nan, math.nan], [0.9, 0.1]])),
)


@pytest.fixture
def module(script: Script) -> ModuleType:
    return script("policy_features")


def draw(node: int, name: str = "suffix", evidence: tuple[float, ...] = (4.0, 1.0, 1.0)) -> Draw:
    return Draw(0, node, name, DrawRule.POINT_MASS, None, 0.5, evidence)


def place(module: ModuleType, *draws: Draw, accepted: int | None = None, **where: Any) -> Any:
    where = {"request": "0", "end": 5, "depth": 0, **where}
    return module.Place([*draws], accepted, 0.0, **where)


def test_each_feature_says_what_it_is_to_say(module: ModuleType) -> None:
    of_draft = draw(4, "draft", (0.5, 0.2))
    first = place(module, draw(1), draw(2), draw(3), of_draft, accepted=1, depth=2)
    later = place(module, draw(1), accepted=None, request="1", end=4)
    prompt = place(module, draw(1, evidence=(40.0,)), end=3, depth=9)
    known = [values[:, 9:] for _, values in module.inputs_of(TRACE, [first, later, prompt], module.MORE)]
    # of each draw: depth, rank, length, root, own
    assert known[0].tolist() == [
        [0.25, 0.0, 0.25, 0.5, 0.0],
        [0.25, 0.0, 0.25, 0.5, 0.0],
        [0.25, 0.5, 0.25, 0.5, 0.0],
        [0.25, 0.0, 0.0, 0.5, 0.0],
    ]
    assert known[1].tolist() == [[0.0, 0.0, 0.25, 0.0, 0.0]], "text 1 has no guess yet that differs"
    [[depth, rank, length, root, own]] = known[2].tolist()
    assert (depth, rank, length, root) == (1.0, 0.0, 1.0, 0.0), "bounded; a prompt's token was not chosen"
    assert own > 0, "the text's one guess was right, of all texts' two one"


@pytest.mark.parametrize("name", ["depth", "rank", "length", "root", "own"])
def test_a_feature_that_decides_takes_from_the_loss_and_no_other_does(module: ModuleType, name: str) -> None:
    luck, places = random.Random(0), []
    for _ in range(600):
        value = luck.random() < 0.5  # whether the guess will be right, which one feature alone shows
        where = {
            "request": str(int(value)) if name == "own" else "0",
            "end": 5 if name == "root" and value else 4,
            "depth": 8 * value if name == "depth" else 0,
        }
        draws = [draw(n, evidence=(16.0 * value if name == "length" else 0.0, 1.0, 1.0)) for n in (1, 2, 3)]
        right = (1 if value else 3) if name == "rank" else 1 if value else None
        places.append(place(module, *draws, accepted=right, **where))
    loss = {which: sum(module.losses_of(TRACE, places, more, {})) for which, more in module.SETS.items()}
    assert loss[name] < 0.95 * loss["now"]
    assert loss["all"] < 0.95 * loss["now"]
    for other in set(module.MORE) - {name, "rank"}:
        assert loss[other] > 0.97 * loss["now"], other


def test_policy_features(module: ModuleType, run: Run, traces: list[Path]) -> None:
    options = ["--traces", *map(str, traces)]
    page = run(module, *options)
    lines = [line for line in page if line.startswith(("| played", "| other"))]
    assert len(lines) == 2
    for line in lines:
        _, guesses, loss, *ratios = [cell.strip() for cell in line.strip("|").split("|")]
        assert int(guesses) > 0
        assert float(loss) > 0
        assert len(ratios) == len(module.SETS) - 1
        assert all(0.5 < float(ratio.split()[0]) < 2 for ratio in ratios)
    assert run(module, *options) == page
