"""Lookup speculation on texts a person can read, and trees to the bit; each letter is a token."""

from __future__ import annotations

import random
from array import array
from ctypes import byref
from typing import Any

import pytest

from specinfer.kernels.library import Library
from specinfer.kernels.structures import GrownArgs, LookupRules
from specinfer.plan import PlanEntry
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.lookups.lookup import LookupOptions, LookupSpeculator
from specinfer.speculate.lookups.text_index import TextIndex
from specinfer.tree import TokenTree
from specinfer.tree.draw import Verifier
from tests.engines import Tiny
from tests.kernels import library_or_skip
from tests.letters import letters, spelled
from tests.lone_speculator import answer as answer_in_engine
from tests.lone_speculator import expected
from tests.oracles.lookup_trees import lookup_tree
from tests.plans import entry, outcome, plan


def salted(key: str | None) -> SamplingParams:
    return SamplingParams(cache_salt=key)


def guess(
    speculator: LookupSpeculator, text: str, *, request_id: str = "r", salt: str | None = None, **limits: int
) -> list[str]:
    """The branches for a request whose prompt is `text`."""
    asked = entry(letters(text), request_id=request_id, params=salted(salt), **limits)
    [tree] = speculator.propose(plan(asked))
    assert tree.token_ids[0] == ord(text[-1]), "the root is the last token"
    return spelled(tree)


def answer(
    speculator: LookupSpeculator,
    prompt: str,
    output: str,
    *,
    salt: str | None = None,
    request_id: str = "past",
) -> None:
    """A request comes, says `output`, and ends."""
    speculator.propose(plan(entry(letters(prompt), request_id=request_id, params=salted(salt))))
    speculator.observe([outcome(*letters(output), request_id=request_id, finished=True)])


def lookup(*, verifier: str = "coupled", **options: Any) -> LookupSpeculator:
    lookup_options = LookupOptions(**{"max_depth": 3, "min_probability": 0.0, "depth_factor": 4.0, **options})
    return LookupSpeculator(library_or_skip(), lookup_options, verifier=verifier)


def test_an_answer_is_guessed_again_for_a_later_request() -> None:
    speculator = lookup(max_depth=5)
    answer(speculator, "say:", "world")
    assert guess(speculator, "say:") == ["world"]  # the prompt's end is kept before the answer
    assert guess(speculator, "do wor", request_id="2") == ["ld"]


def test_a_running_answer_is_not_shared_a_finished_or_aborted_one_is() -> None:
    speculator = lookup()
    speculator.propose(plan(entry(letters("q:"), request_id="1")))
    speculator.observe([outcome(*letters("abc"), request_id="1")])
    assert guess(speculator, "xab", request_id="2") == []
    speculator.observe([outcome(request_id="1", finished=True)])
    assert guess(speculator, "xab", request_id="3") == ["c"]


def test_cache_keys_do_not_see_each_other() -> None:
    speculator = lookup()
    answer(speculator, "q:", "ab1", salt="mine")
    answer(speculator, "q:", "ab2", salt="yours")
    answer(speculator, "q:", "ab3")
    assert guess(speculator, "ab", salt="mine", request_id="1") == ["1"]
    assert guess(speculator, "ab", salt="yours", request_id="2") == ["2"]
    assert guess(speculator, "ab", request_id="3") == ["3"]
    assert guess(speculator, "ab", salt="None", request_id="4") == []


def test_without_memory_the_own_text_is_still_looked_at() -> None:
    speculator = lookup(memory=0)
    answer(speculator, ":", "xyz")
    assert guess(speculator, "x", request_id="1") == []
    assert guess(speculator, "xyz-x", request_id="2") == ["yz-"]


def test_of_a_request_it_was_never_asked_about_nothing_is_learnt() -> None:
    speculator = lookup()
    speculator.observe([outcome(*letters("abc"), finished=True)])
    assert guess(speculator, "ab") == []


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_a_second_answer_takes_the_fewest_steps(tiny: Tiny, verifier: Verifier) -> None:
    speculator = lookup(min_probability=0.05)
    first, again = (
        answer_in_engine(tiny, speculator, verifier, request_id=request_id)
        for request_id in ("first", "again")
    )
    assert list(first.token_ids) == list(again.token_ids) == expected(tiny)
    assert again.figures.accepted_by == {"lookup": again.figures.accepted_tokens}
    assert first.figures.tokens_per_step < again.figures.tokens_per_step
    assert again.figures.tokens_per_step > 3.5  # at most 4 are possible, and the last step is cut short


def test_a_prompt_is_read_in_step_with_the_target() -> None:
    speculator, text = lookup(), letters("one two three one two ")
    for end in (6, 12):
        assert speculator.propose(plan(entry(text, start=end - 6, end=end, max_nodes=0))) == []
        [running] = speculator._running.values()
        assert running.text.num_tokens == end
    [tree], [whole] = (s.propose(plan(entry(text))) for s in (speculator, lookup()))
    assert (tree.token_ids, tree.parents) == (whole.token_ids, whole.parents)
    assert tree.num_nodes > 3


def test_earlier_answers_are_not_looked_at_where_they_tell_what_is_drawn() -> None:
    for params, verifier, found in (
        ({"seed": 1}, "coupled", ["ld"]),
        ({"seed": 1}, "mss", []),
        ({}, "mss", ["ld"]),
        ({"seed": 1, "temperature": 0.0}, "mss", ["ld"]),
        ({"seed": 1, "speculation": {"verifier": "mss"}}, "coupled", []),
        ({"seed": 1, "speculation": {"verifier": "coupled"}}, "mss", ["ld"]),
    ):
        speculator = lookup(verifier=verifier)
        answer(speculator, "say:", "world")
        asked = entry(letters("do wor"), params=SamplingParams(**params))
        assert spelled(speculator.propose(plan(asked))[0]) == found, (params, verifier)
        own = entry(letters("ab-ab"), request_id="own", params=SamplingParams(**params))
        assert spelled(speculator.propose(plan(own))[0]) == ["-ab"], "its own text is its own"


MOST = (1 << 63) - 1


def plainly(tree: TokenTree) -> tuple[Any, ...]:
    """Return a tree's comparable parts; draws have no equality."""
    return tree.token_ids, tree.parents, [tuple(draw) for draw in tree.draws]


def options_of(luck: random.Random) -> LookupOptions:
    return LookupOptions(
        min_match=luck.choice([1, 1, 2, 3, 9, 32]),
        max_depth=luck.choice([1, 2, 5, 16, 40, 10**9]),
        max_nodes=luck.choice([1, 2, 3, 8, 32, 200]),
        min_probability=luck.choice([0.0, 0.05, 1 / 3, 0.5, 1.0]),
        depth_factor=luck.choice([1e-300, 0.3, 1.0, 4.0, 1e300]),
        memory=luck.choice([0, 5000, 9000, 30_000, 1 << 20]),
    )


class Serving:
    """Requests that start, continue with or without accepted guesses, and end."""

    def __init__(self, luck: random.Random, options: LookupOptions, library: Library) -> None:
        self._luck = luck
        self._options = options
        self.speculator = LookupSpeculator(library, options)
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
        trees = self.speculator.propose(plan(*entries))
        guessing = [one for one in entries if one.has_tree]
        outcomes = []
        for one, tree in zip(guessing, trees, strict=True):
            self._compare(one, tree)
            name, text = one.request.request_id, self._texts[one.request.request_id][2]
            node = luck.randrange(tree.num_nodes)
            committed = [*tree.path_tokens(node), *self._some(luck.randrange(3))]
            ends = luck.random() < 0.15
            text += committed
            outcomes.append(outcome(*committed, request_id=name, finished=ends))
            if ends:
                del self._texts[name]
        self.speculator.observe(outcomes)

    def _compare(self, asked: PlanEntry, tree: TokenTree) -> None:
        index = self.speculator._store.of(asked.request.params.cache_salt)
        kept = [] if index is None else index.texts()
        token_ids, parents, draws = lookup_tree(
            list(asked.token_ids[: asked.end]),
            kept,
            self._options,
            min(self._options.max_depth, asked.max_depth),
            min(self._options.max_nodes, asked.max_nodes),
        )
        assert plainly(tree) == (token_ids, parents, [tuple(draw) for draw in draws])
        tree.check_integrity()
        self.compared += tree.num_nodes - 1

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


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(25))
def test_trees_are_those_found_by_looking_everywhere(library: Library, seed: int) -> None:
    luck = random.Random(seed)
    options = options_of(luck)
    serving = Serving(luck, options, library)
    for _ in range(40):
        serving.step()
    assert serving.compared > 0 or options.max_nodes == 1 or options.min_match > 2


@pytest.mark.parametrize("token", [-1, -(1 << 31), 1 << 31, 1 << 70])
def test_what_is_no_token_is_refused_and_nothing_is_read(library: Library, token: int) -> None:
    speculator = LookupSpeculator(library)
    for _ in range(2):
        with pytest.raises((ValueError, OverflowError)):
            speculator.propose(plan(entry([1, 2, token])))
    [tree], [new] = (one.propose(plan(entry([1, 2, 1]))) for one in (speculator, LookupSpeculator(library)))
    assert plainly(tree) == plainly(new)


class Raw:
    """The library's own call, for arguments that Python would never pass."""

    def __init__(self, library: Library) -> None:
        self.index = TextIndex(library)
        self.index.extend([1, 2, 1, 2])
        self.tokens = array("i", [2, 1, 2])
        self.room = 4
        self.nodes, self.chances = array("i", [-7] * 16), array("d", bytes(8 * 4 * self.room))
        self.call = library.lookup_trees

    def there(self, *asks: tuple[int, ...], **rules: Any) -> bool:
        """Whether it answers."""
        numbers = array("q", [number for ask in asks for number in ask])
        at, chance, tokens = (one.buffer_info()[0] for one in (self.nodes, self.chances, self.tokens))
        to = GrownArgs(self.room, at, at + 4 * 4, at + 4 * 8, chance, chance + 8 * self.room)
        settled = {"longest": 32, "surest": 16, "depth_factor": 4.0, "min_probability": 0.0}
        rule = LookupRules(**{**settled, **rules})
        numbers_at = numbers.buffer_info()[0]
        return bool(self.call(byref(rule), numbers_at, len(asks), tokens, len(self.tokens), byref(to)))


@pytest.mark.parametrize("depth", [-MOST, 0, 1, MOST])
@pytest.mark.parametrize("nodes", [-MOST, 0, 1, 2, MOST])
def test_no_number_leads_out_of_the_room(library: Library, depth: int, nodes: int) -> None:
    raw = Raw(library)
    assert raw.there((raw.index.address, 0, 3, depth, nodes), depth_factor=1e308)
    if depth == MOST:
        assert raw.nodes[0] == max(0, min(nodes - 1, raw.room)), "a loop is guessed to loop"
    else:
        assert 0 <= raw.nodes[0] <= max(0, min(nodes - 1, raw.room if depth > 0 else 0))
    assert [*raw.nodes[12:]] == [-7] * 4, "what lies behind the room"
