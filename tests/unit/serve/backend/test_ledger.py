"""Output, replicas and blamed crashes of works, without processes and clocks."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from specinfer import SamplingParams
from specinfer.request import Delta, FinishReason
from specinfer.sampling_params import SpeculationParams
from specinfer.serve.backend.ledger import Ledger, OpenWork, Waiter
from specinfer.serve.backend.work import Work

PARAMS = SamplingParams(seed=1, temperature=1.0)
MSS = replace(PARAMS, speculation=SpeculationParams(verifier="mss"))


class Books:
    """A ledger, and its works by name."""

    def __init__(self, names: str, params: SamplingParams = PARAMS, verifier: str = "coupled") -> None:
        self.ledger = Ledger(verifier)
        self.works = {name: OpenWork(Work(name, (1,), params), Waiter()) for name in names}
        for one in self.works.values():
            self.ledger.add(one)

    def give(self, replica: int, names: Iterable[str]) -> str:
        """Assign works to a replica; which are due then."""
        for name in names:
            self.ledger.assign(self.works[name], replica)
        return self.due(replica)

    def due(self, replica: int) -> str:
        return "".join(work.id for work in self.ledger.take_sendable(replica))

    def says(self, replica: int, name: str, *tokens: int, maker: str = "f", last: bool = False) -> None:
        reason = FinishReason.LENGTH if last else None
        self.ledger.receive(replica, maker, [Delta(name, "", tokens, finish_reason=reason)])

    def dies(self, replica: int, busy: str | None) -> None:
        self.ledger.engine_died(replica, None if busy is None else frozenset(busy))

    @property
    def open(self) -> str:
        """Works that have not ended."""
        return "".join(one.work.id for replica in (None, 0, 1, 2) for one in self.ledger.of(replica))

    @property
    def failed(self) -> dict[str, str]:
        return {name: str(one.waiter.failure) for name, one in self.works.items() if one.waiter.failure}


def test_another_replica_continues_after_the_sent_tokens() -> None:
    books = Books("ab")
    assert books.give(0, "ab") == "ab"
    assert books.due(0) == ""
    books.says(0, "a", 5, 6, maker="f")
    assert (books.ledger.load(0), books.ledger.load(1)) == (2, 0)
    books.dies(0, "a")
    assert [one.work.id for one in books.ledger.of(None)] == ["a", "b"]
    books.ledger.assign(books.works["a"], 1)
    assert [work.prior_output for work in books.ledger.take_sendable(1)] == [(5, 6)]
    assert [one.maker for one in books.works.values()] == ["f", None]
    assert (books.ledger.load(0), books.ledger.load(1), books.ledger.handed_on) == (0, 1, 1)
    books.says(0, "a", 7)  # from the replica that has it no more
    books.says(1, "a", 8, last=True)
    assert [delta.token_ids for delta in books.works["a"].waiter.pending["a"]] == [(5, 6), (8,)]
    assert (books.open, books.ledger.load(1)) == ("b", 0)


def test_engines_abort_works_that_ended() -> None:
    books = Books("abcd")
    books.give(0, "a")
    books.give(1, "b")
    books.ledger.assign(books.works["c"], 1)  # which is not sent yet
    assert books.ledger.end("abcdx") == {0: ["a"], 1: ["b"]}
    assert (books.open, books.ledger.load(0), books.ledger.load(1)) == ("", 0, 0)
    assert books.due(1) == ""


def test_under_mss_a_started_text_ends_with_its_engine() -> None:
    cases: list[tuple[SamplingParams, str, bool]] = [
        (PARAMS, "coupled", True),
        (PARAMS, "mss", False),
        (replace(PARAMS, temperature=0.0), "mss", True),
        (MSS, "coupled", False),
    ]
    for params, verifier, moves in cases:
        books = Books("ab", params, verifier)
        books.give(0, "ab")
        books.says(0, "a", 5)
        assert books.ledger.may_move(books.works["a"]) is moves, (params, verifier)
        assert books.ledger.may_move(books.works["b"]), (params, verifier)
        books.dies(0, "ab")
        assert list(books.failed) == ([] if moves else ["a"]), (params, verifier)
        assert [one.work.id for one in books.ledger.of(None)] == ["a"] * moves + ["b"], (params, verifier)


def test_a_suspect_is_sent_when_all_beside_it_have_a_token_and_alone() -> None:
    books = Books("abcde")
    for replica in (0, 1):
        books.give(replica, "ab")
        books.dies(replica, "ab")
    assert books.works["a"].is_suspect
    assert (books.give(0, "cd"), books.give(0, "ab")) == ("cd", "")
    books.says(0, "c", 5)
    for name, token, due in (("c", 6, ""), ("d", 5, ""), ("d", 6, "a")):  # d may still be why it dies
        books.says(0, name, token)
        assert books.due(0) == due
    assert books.give(0, "e") == ""
    for name, token, due in (("c", 6, ""), ("a", 5, ""), ("a", 6, "b")):
        books.says(0, name, token)
        assert books.due(0) == due
    books.dies(0, "abcd")
    assert list(books.failed) == ["b"]
    assert "died 3 times in a row" in books.failed["b"]
    assert [books.works[name].deaths for name in "acde"] == [1, 1, 1, 0]


def test_with_the_last_suspect_gone_all_that_is_held_is_sent() -> None:
    books = Books("abc")
    for _ in range(2):
        books.give(0, "a")
        books.dies(0, None)  # it had said nothing
    assert books.give(0, "abc") == "a"
    assert books.ledger.end("a") == {0: ["a"]}
    assert books.due(0) == "bc"


def test_a_work_that_kills_behind_its_first_tokens_is_found_and_one_that_kills_now_and_then_ends() -> None:
    books = Books("ab")
    for replica in range(3):
        assert books.give(replica, "a") == "a"
        books.says(replica, "a", replica)  # with the prompt
        books.dies(replica, "a")
    assert list(books.failed) == ["a"]
    for replica in range(10):
        books.give(replica, "b")
        books.says(replica, "b", replica)
        books.says(replica, "b", replica)
        books.dies(replica, "b")
    assert "died 10 times while it had this request" in books.failed["b"]


@pytest.mark.parametrize("seed", range(20))
def test_no_token_is_lost_or_comes_twice_whichever_replicas_die(seed: int) -> None:
    """Engines say the next numbers of each work, also late, behind their death or a work's move."""
    chance, names = random.Random(seed), "abcdefgh"
    books = Books(names)
    engines: dict[int, dict[str, int]] = {replica: {} for replica in range(3)}  # next token of each work
    late: list[tuple[int, str, int]] = []
    for _ in range(20_000):
        if not books.open:
            break
        for one in books.ledger.of(None):
            books.ledger.assign(one, chance.randrange(3))
        for replica, engine in engines.items():
            engine |= {work.id: len(work.prior_output) for work in books.ledger.take_sendable(replica)}
        replica = chance.randrange(3)
        engine = engines[replica]
        match chance.randrange(10):
            case 0:
                late += [(replica, name, token) for name, token in engine.items()]
                books.dies(replica, "".join(engine) if chance.random() < 0.5 else "")
                engine.clear()
            case 1 if moving := books.ledger.of(replica):
                one = chance.choice(moving)
                late += [(replica, one.work.id, engine.pop(one.work.id))] if one.sent else []
                books.ledger.assign(one, (replica + 1) % 3)
            case _:
                for name, token in list(engine.items()):
                    engine[name] = token + 1
                    books.says(replica, name, token, last=token == 49)
                    if token == 49:
                        del engine[name]
        while late:
            stale, name, token = late.pop()
            if books.works[name].replica != stale:  # the backend drops what a dead process said
                books.says(stale, name, token)
    assert not books.open
    for name in set(names) - set(books.failed):
        output_ids = [token for delta in books.works[name].waiter.pending[name] for token in delta.token_ids]
        assert output_ids == list(range(50))
    assert len(books.failed) < len(names)
    assert all(books.ledger.load(replica) == 0 for replica in engines)
