"""Values of SpeculationParams in every notation: one line for each invalid value."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.errors import RequestError
from specinfer.sampling_params import SpeculationParams
from specinfer.tree.token_tree import Expansion


def test_every_way_to_say_it() -> None:
    for given, meant in (
        (None, SpeculationParams()),
        (False, SpeculationParams(enabled=False)),
        ({"max_nodes": 1}, SpeculationParams(max_nodes=1)),
        ({"expansion": "2,1"}, SpeculationParams(expansion=Expansion((2, 1)))),
        ({"expansion": "<1,1,3>"}, SpeculationParams(expansion=Expansion((1, 1, 3)))),
        ({"expansion": [2, 1]}, SpeculationParams(expansion=Expansion((2, 1)))),
        ({"speculators": "lookup"}, SpeculationParams(speculators=("lookup",))),
        ({"verifier": "mss"}, SpeculationParams(verifier="mss")),
        (SpeculationParams(max_nodes=3), SpeculationParams(max_nodes=3)),
    ):
        assert SpeculationParams.of(given) == meant, given


SPECULATORS = "allowed: names of speculators, at least one; to switch speculation off, set enabled to false"


WRONG: list[tuple[Any, str]] = [
    (
        "on",
        "speculation is 'on'; allowed: true, false, or a mapping of enabled, max_nodes, expansion, "
        "speculators, verifier",
    ),
    (
        {"nodes": 3},
        "speculation has no option 'nodes'; allowed: enabled, max_nodes, expansion, speculators, verifier",
    ),
    ({"enabled": "no"}, "speculation.enabled is 'no'; allowed: true or false"),
    ({"max_nodes": 0}, "speculation.max_nodes is 0; allowed: an integer >= 1, the root included"),
    ({"expansion": "1,x"}, "speculation.expansion is '1,x'; allowed: integers >= 1"),
    ({"expansion": [0]}, "speculation.expansion is '0'; allowed: "),
    ({"speculators": []}, f"speculation.speculators is []; {SPECULATORS}"),
    ({"speculators": [1]}, f"speculation.speculators is [1]; {SPECULATORS}"),
    ({"verifier": "naive"}, "speculation.verifier is 'naive'; allowed: coupled, mss"),
]


def test_a_wrong_value_is_one_line() -> None:
    for given, line in WRONG:
        with pytest.raises(RequestError) as caught:
            pytest.fail(f"{given}: {SpeculationParams.of(given)}")
        assert str(caught.value).startswith(line)


def test_wishes_are_frozen_and_hashable() -> None:
    wishes: Any = SpeculationParams.of({"speculators": ["a"], "expansion": [1]})
    assert hash(wishes) == hash(SpeculationParams(speculators=("a",), expansion=Expansion((1,))))
