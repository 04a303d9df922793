"""Verification walks of several requests: batched queries, their nodes, and dead ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specinfer.engine.target_laws import TargetLaws, verify_trees
from specinfer.errors import LogitsError, RequestError, UserError
from specinfer.processors.changes import Changes
from specinfer.processors.pipeline import Processors
from specinfer.runtime import flight as flight_module
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.tree import TokenTree
from specinfer.verify.coupled import Acceptance
from specinfer.verify.scan import LogitBlock, Scan
from tests import plans
from tests.flights import choose, flight_over

VOCAB = 6
PROMPT, OUTPUT = (1, 2), (3, 3)
CHAIN = TokenTree((3, 0, 1), (-1, 0, 1))  # the root, then 0, then 1

Rows = NDArray[np.float32]


class NotedScan(Scan):
    """Notes every question: how many rows, whether some are changed, and the block they lie in."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, LogitBlock]] = []

    def choices(
        self, logits: LogitBlock, rows: NDArray[np.int64], requests: Any, changes: Changes | None = None
    ) -> NDArray[np.int64]:
        self.asked.append((len(rows), changes is not None, logits))
        return super().choices(logits, rows, requests, changes)


def laws_of(flight: Flight, *of: dict[str, Any]) -> list[TargetLaws]:
    """One request for each of these parameters, each with a chain as its tree."""
    made = []
    for place, given in enumerate(of):
        words, params = given.get("bad_words", ()), {k: v for k, v in given.items() if k != "bad_words"}
        asked = SamplingParams(**{"temperature": 0, **params})
        processors = Processors(asked, PROMPT, vocab=VOCAB, ending=[5], bad_words=words)
        processors.commit(OUTPUT)
        entry = plans.entry(PROMPT, OUTPUT, params=asked, processors=processors)
        made.append(TargetLaws(entry, CHAIN, flight, CHAIN.num_nodes * place))
    return made


def rows(*likeliest: int) -> Rows:
    """A row for each of these tokens, which is far ahead of the others in it."""
    rows_RV = np.tile(np.arange(VOCAB, dtype=np.float32) / 8, (len(likeliest), 1))
    rows_RV[np.arange(len(likeliest)), likeliest] = 4
    return rows_RV


def flight_of(rows_RV: Rows, scan: Scan) -> Flight:
    return flight_over(torch.from_numpy(rows_RV), scan)


def verified(rows_RV: Rows, *of: dict[str, Any]) -> tuple[list[Acceptance | UserError], NotedScan, Flight]:
    scan = NotedScan()
    flight = flight_of(rows_RV, scan)
    return verify_trees(laws_of(flight, *of), "coupled", flight), scan, flight


def test_rows_are_asked_where_they_lie_all_in_one_question_a_level() -> None:
    of: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.5},
        {"logit_bias": {0: 2.0}},
        {"bad_words": [[2], [0, 4]], "min_tokens": 9},
        {"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.9, "seed": 4},
    ]
    results, scan, flight = verified(rows(*[0, 1, 2] * len(of)), *of)
    assert results == [Acceptance((1, 2), token) for token in (2, 2, 2, 4, 2)]
    assert [(count, changed) for count, changed, _ in scan.asked] == [(5, True)] * 3
    assert {id(block) for *_, block in scan.asked} == {id(flight._whole)}, "no row is copied"


def test_a_row_without_numbers_below_the_root_keeps_what_was_accepted() -> None:
    rows_RV = rows(0, 1, 2)
    rows_RV[1] = np.nan
    results, *_ = verified(rows_RV, {})
    assert results == [Acceptance((), 0)], "the next step meets the error"


def test_a_pass_whose_logits_come_in_blocks_is_asked_where_walks_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "MAX_BYTES", 2 * 4 * VOCAB)
    results, scan, _ = verified(rows(0, 3, 3), {})
    assert results == [Acceptance((1,), 3)]
    assert [count for count, *_ in scan.asked] == [1, 1]


def test_choices_are_those_of_each_law_alone() -> None:
    rng = np.random.default_rng(5)
    of: list[dict[str, Any]] = [
        {},
        {"temperature": 1, "presence_penalty": 1.5, "frequency_penalty": -0.3, "seed": 8},
        {"temperature": 1.5, "top_k": 4, "bad_words": [[2], [0, 4]], "repetition_penalty": 1.4, "seed": 9},
        {"temperature": 1, "min_tokens": 4, "logit_bias": {5: 3.0, 1: -1.0}, "min_p": 0.05, "seed": 10},
    ]
    for _ in range(30):
        rows_RV = rng.normal(size=(3 * len(of), VOCAB)).astype(np.float32) * 2
        flight = flight_of(rows_RV, Scan())
        laws = laws_of(flight, *of)
        for one, result in zip(laws, verify_trees(laws, "coupled", flight), strict=True):
            path: list[int] = []
            node, token = 0, choose(one, 0)
            while (child := CHAIN.children()[node].get(token)) is not None:
                path.append(node := child)
                token = choose(one, node)
            assert result == Acceptance(tuple(path), token)


ALL_BANNED = [[token] for token in range(VOCAB)]


def test_parameters_that_leave_no_token_are_named_and_stop_no_other() -> None:
    for given, said in (
        ({"bad_words": ALL_BANNED}, "bad_words leave no token to choose after 2 tokens; relax one of them"),
        (
            {"bad_words": ALL_BANNED[:5], "min_tokens": 3, "presence_penalty": 1},
            "bad_words and min_tokens leave no token to choose after 2 tokens; relax one of them",
        ),
        (
            {"bad_words": ALL_BANNED, "logit_bias": {2: 9}},
            "bad_words leave no token to choose after 2 tokens",
        ),
    ):
        results, *_ = verified(rows(*[0, 1, 2] * 3), {}, given, {"presence_penalty": 1})
        assert results[::2] == [Acceptance((1, 2), 2)] * 2, given
        assert isinstance(results[1], RequestError), given
        assert str(results[1]).startswith(said), given


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "given", [{}, {"presence_penalty": 1}, {"bad_words": [[2]]}, {"bad_words": ALL_BANNED[1:]}]
)
def test_a_row_without_numbers_is_the_models_error(given: dict[str, Any], value: float) -> None:
    rows_RV = rows(0, 1, 2)
    rows_RV[0] = -np.inf
    rows_RV[0, 0] = value
    [result], *_ = verified(rows_RV, given)
    assert isinstance(result, LogitsError)
    assert "the largest must be finite" in str(result)
