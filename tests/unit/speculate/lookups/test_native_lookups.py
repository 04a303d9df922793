"""The library looks up what plain Python does: the same trees to the last bit, whatever the texts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from ctypes import byref
from typing import Any

import pytest

from specinfer.kernels.library import Library, LookedUpArgs, LookupRules
from specinfer.plan import PlanEntry
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.lookups.lookups import Ask
from specinfer.speculate.lookups.native_lookups import NativeLookups
from specinfer.speculate.lookups.native_text_index import NativeTextIndex
from specinfer.speculate.lookups.ngram import NgramSpeculator
from specinfer.speculate.lookups.plain_lookups import PlainLookups
from specinfer.speculate.lookups.suffix import SuffixSpeculator
from specinfer.tree import TokenTree
from tests.kernels import library_or_skip
from tests.plans import entry, outcome, plan

MOST = (1 << 63) - 1


@pytest.fixture(scope="module")
def library() -> Library:
    return library_or_skip()


def plainly(tree: TokenTree) -> tuple[Any, ...]:
    """A tree's parts, of which equal ones are equal: no two draws are."""
    return tree.token_ids, tree.parents, [tuple(draw) for draw in tree.draws]


def suffix_options(luck: random.Random) -> dict[str, Any]:
    return {
        "max_depth": luck.choice([1, 2, 5, 16, 40, 10**9]),
        "max_nodes": luck.choice([1, 2, 3, 8, 32, 200]),
        "min_probability": luck.choice([0.0, 0.05, 1 / 3, 0.5, 1.0]),
        "depth_factor": luck.choice([1e-300, 0.3, 1.0, 4.0, 1e300]),
        "memory": luck.choice([0, 5000, 9000, 30_000, 1 << 20]),
    }


def ngram_options(luck: random.Random) -> dict[str, Any]:
    shortest = luck.randrange(1, 4)
    return {
        "shortest": shortest,
        "longest": shortest + luck.choice([0, 1, 3, 20]),
        "branches": luck.choice([1, 2, 4]),
        "depth": luck.choice([1, 3, 7, 100]),
    }


class Serving:
    """Requests that come, go on by what some speculators guess or otherwise, and end."""

    def __init__(self, luck: random.Random, speculators: list[Any]) -> None:
        self._luck = luck
        self._speculators = speculators
        self._alphabet = luck.choice([1, 2, 3, 8])
        self._texts: dict[str, tuple[str | None, int, list[int]]] = {}  # key, tokens of the prompt, text
        self._came = 0
        self.compared = 0

    def step(self) -> None:
        luck = self._luck
        while len(self._texts) < 3 or luck.random() < 0.2:
            prompt = self._some(luck.choice([1, 2, 10, 40, 90]))
            self._came += 1
            self._texts[str(self._came)] = luck.choice([None, "x", "y"]), len(prompt), prompt
        entries = [self._entry(name) for name in self._texts if luck.random() < 0.8]
        trees = self._same(lambda one: one.propose(plan(*entries)))
        guessing = [one for one in entries if one.has_tree]
        for one in guessing:
            for _ in range(luck.randrange(3)):
                path, most = tuple(self._some(luck.choice([1, 2, 5, 40]))), luck.choice([2, 3, 9, 60])
                self._same(lambda it, one=one, path=path, most=most: [it.extend(one, path, most)])  # type: ignore[misc]
        outcomes = []
        for one, tree in zip(guessing, trees, strict=True):
            name, text = one.request.request_id, self._texts[one.request.request_id][2]
            node = luck.randrange(tree.num_nodes)
            committed = [*tree.path_tokens(node), *self._some(luck.randrange(3))]
            ends = luck.random() < 0.15
            text += committed
            outcomes.append(outcome(*committed, request_id=name, finished=ends))
            if ends:
                del self._texts[name]
        for speculator in self._speculators:
            speculator.observe(outcomes)

    def _some(self, count: int) -> list[int]:
        return [self._luck.randrange(self._alphabet) for _ in range(count)]

    def _entry(self, name: str) -> PlanEntry:
        luck = self._luck
        key, prompt, text = self._texts[name]
        whole = len(text) > prompt or luck.random() < 0.7
        return entry(
            text[:prompt],
            text[prompt:],
            request_id=name,
            params=SamplingParams(cache_salt=key),
            end=len(text) if whole else luck.randrange(1, len(text) + 1),
            max_nodes=luck.choice([1, 2, 5, 64]) if whole else 0,
            max_depth=luck.choice([0, 1, 9, 100]),
        )

    def _same(self, ask: Callable[[Any], list[TokenTree]]) -> list[TokenTree]:
        """What the first one says, and so does the other."""
        trees, others = (ask(speculator) for speculator in self._speculators)
        assert [plainly(tree) for tree in trees] == [plainly(tree) for tree in others]
        for tree in trees:
            tree.check_integrity()
        self.compared += sum(tree.num_nodes - 1 for tree in trees)
        return trees


@pytest.mark.parametrize("seed", range(25))
def test_suffix_trees_are_the_same(library: Library, seed: int) -> None:
    luck = random.Random(seed)
    options = suffix_options(luck)
    plain, native = SuffixSpeculator(**options), SuffixSpeculator(**options, library=library)
    serving = Serving(luck, [plain, native])
    for _ in range(40):
        serving.step()
        plain.check_integrity()
        native.check_integrity()
    assert serving.compared > 0 or options["max_nodes"] == 1


@pytest.mark.parametrize("seed", range(25))
def test_ngram_trees_are_the_same(library: Library, seed: int) -> None:
    luck = random.Random(1000 + seed)
    options = ngram_options(luck)
    serving = Serving(luck, [NgramSpeculator(**options), NgramSpeculator(**options, library=library)])
    for _ in range(40):
        serving.step()
    assert serving.compared > 0


def test_a_depth_that_nobody_can_count_is_a_depth(library: Library) -> None:
    text = [1, 2, 3] * 4
    for most in (2, 9, 1000):
        trees = []
        for lookups in (PlainLookups("x"), NativeLookups("x", library)):
            ask = Ask(lookups.new_index(), text, len(text), (), 2000, most, 16)
            trees += lookups.suffix_trees([ask], depth_factor=1e300, min_probability=0.0)
            ask = Ask(lookups.new_index(), text, len(text), (), 2000, most, 4)
            trees += lookups.ngram_trees([ask])
        assert [plainly(tree) for tree in trees[:2]] == [plainly(tree) for tree in trees[2:]]
        assert trees[0].num_nodes == most


@pytest.mark.parametrize("token", [-1, -(1 << 31), 1 << 31, 1 << 70])
def test_what_is_no_token_is_refused_and_nothing_is_read(library: Library, token: int) -> None:
    lookups = NativeLookups("x", library)
    index = lookups.new_index()
    wrong = Ask(index, [1, 2, token], 3, (), 4, 4, 1)
    for look_up in (lookups.ngram_trees, lambda asks: lookups.suffix_trees(asks, **RULE)):
        with pytest.raises((ValueError, OverflowError)):
            look_up([wrong])
        index.check_integrity()
        assert index.num_tokens == 0


RULE = {"depth_factor": 4.0, "min_probability": 0.0}


class Raw:
    """The library's own calls, for arguments that Python would never pass."""

    def __init__(self, library: Library) -> None:
        self.index = NativeTextIndex(library)
        self.index.extend([1, 2, 1, 2])
        self.tokens = array("i", [2, 1, 2])
        self.room = 4
        self.nodes, self.chances = array("i", [-7] * 16), array("d", bytes(8 * 4 * self.room))
        self.calls = [library.suffix_trees, library.ngram_trees]

    def there(self, *asks: tuple[int, ...], **rules: Any) -> list[bool]:
        """Whether each of the calls answers."""
        told = array("q", [number for ask in asks for number in ask])
        at, chance, tokens = (one.buffer_info()[0] for one in (self.nodes, self.chances, self.tokens))
        to = LookedUpArgs(self.room, at, at + 4 * 4, at + 4 * 8, chance, chance + 8 * self.room)
        settled = {"longest": 32, "surest": 16, "places": 64, "depth_factor": 4.0, "min_probability": 0.0}
        rule = LookupRules(**{**settled, **rules})
        return [
            bool(call(byref(rule), told.buffer_info()[0], len(asks), tokens, len(self.tokens), byref(to)))
            for call in self.calls
        ]


@pytest.mark.parametrize(
    "numbers",
    [
        (4, 0, 5, 5, 16),  # it goes on for longer than there are tokens
        (0, 2, 5, 5, 16),  # and for less
        (-1, 4, 5, 5, 16),
        (4, -1, 5, 5, 16),
        (MOST, MOST, 5, 5, 16),
        (MOST, 4 - MOST, 5, 5, 16),
    ],
)
def test_an_ask_that_leads_out_of_the_tokens_is_refused(library: Library, numbers: tuple[int, ...]) -> None:
    raw = Raw(library)
    assert raw.there((raw.index.address, 0, *numbers)) == [False, False]
    assert raw.there((0, 0, 0, 3, 5, 5, 16)) == [False, False], "no index"
    raw.index.check_integrity()


@pytest.mark.parametrize("depth", [-MOST, 0, 1, MOST])
@pytest.mark.parametrize("nodes", [-MOST, 0, 1, 2, MOST])
@pytest.mark.parametrize("most", [-MOST, 0, 1, MOST])
def test_no_number_leads_out_of_the_room(library: Library, depth: int, nodes: int, most: int) -> None:
    raw = Raw(library)
    assert raw.there((raw.index.address, 0, 0, 3, depth, nodes, most), depth_factor=1e308) == [True, True]
    if depth == MOST:
        assert raw.nodes[0] == max(0, min(nodes - 1, raw.room)), "a loop is guessed to loop"
    else:
        assert 0 <= raw.nodes[0] <= max(0, min(nodes - 1, raw.room if depth > 0 else 0))
    assert [*raw.nodes[12:]] == [-7] * 4, "what lies behind the room"
    raw.index.check_integrity()


def test_no_more_places_vote_than_there_are_bits_for(library: Library) -> None:
    votes = list[list[float]]()
    for most in (32, 33, 64, 100, MOST):
        raw = Raw(library)
        raw.index.extend([1, 2] * 100)
        del raw.calls[1]  # n-grams have branches
        assert raw.there((raw.index.address, 0, 0, 3, 2, 5, most)) == [True]
        assert raw.chances[raw.room + 1] == 32.0, "they vote for the first node"
        votes.append(raw.chances.tolist())
    assert all(vote == votes[0] for vote in votes)
    raw.index.check_integrity()


@pytest.mark.parametrize(
    "rules",
    [{"longest": 0}, {"longest": -1}, {"longest": MOST}, {"surest": -1}, {"surest": MOST}],
)
def test_rules_that_cannot_be_are_refused(library: Library, rules: dict[str, int]) -> None:
    raw = Raw(library)
    assert raw.there((raw.index.address, 0, 0, 3, 5, 5, 16), **rules) == [False, False]


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1e308, -1.0, 0.0])
def test_a_factor_that_is_none_guesses_one_token_or_all(library: Library, factor: float) -> None:
    raw = Raw(library)
    ask = (raw.index.address, 0, 0, 3, 5, 5, 16)
    assert raw.there(ask, depth_factor=factor, min_probability=factor) == [True, True]
