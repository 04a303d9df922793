"""Guesses of trees become one trie for each root, and are found again by path."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.errors import IntegrityError
from specinfer.replay.guess_trie import NO_SITE, GuessRecorder, GuessTrie
from specinfer.tree import Draw, DrawRule


def note(notes: GuessRecorder, path: tuple[int, ...], tokens: list[int], asked: int | None = None) -> None:
    """Note these children of a path; the k-th has confidence 1 / (k + 2), and all saw the path's length."""
    draws = [
        Draw(0, 1, "d", DrawRule.POINT_MASS, None, 1 / (k + 2), (float(len(path)), 0.5))
        for k in range(len(tokens))
    ]
    notes.note(path, len(tokens) if asked is None else asked, tokens, draws)


def at(trie: GuessTrie, place: int, *path: int) -> int:
    """The site of a path below a place's root."""
    site = int(trie.roots[place])
    for token in path:
        tokens, _, below = trie.draws(site)
        site = below[tokens.index(token)]
    return site


def test_trees_of_several_shapes_below_a_root_become_one_trie() -> None:
    notes = GuessRecorder()
    notes.close_root()  # a position without guesses
    note(notes, (), [5])
    note(notes, (5,), [6, 7, 8])
    note(notes, (), [5, 9, 4])
    note(notes, (5,), [6])  # known better already
    note(notes, (9,), [1])
    notes.close_root()
    note(notes, (), [5])
    notes.close_root()
    trie = notes.trie()
    assert trie.complaint(3, 10) == ""
    assert trie.roots.tolist()[0] == NO_SITE
    assert trie.draws(at(trie, 1))[:2] == ([5, 9, 4], [1 / 2, 1 / 3, 1 / 4])
    assert trie.draws(at(trie, 1, 5))[0] == [6, 7, 8]
    assert trie.draws(at(trie, 1, 9)) == ([1], [0.5], [NO_SITE])
    assert at(trie, 1, 4) == NO_SITE
    assert trie.seen(at(trie, 1, 5)) == (1.0, 0.5)
    assert trie.draws(at(trie, 2))[0] == [5]
    assert trie.asked[at(trie, 1)] == 3


def test_a_site_without_draws_is_told_from_one_nobody_asked() -> None:
    notes = GuessRecorder()
    note(notes, (), [], asked=4)
    notes.close_root()
    note(notes, (), [3])
    notes.close_root()
    trie = notes.trie()
    assert trie.complaint(2, 10) == ""
    assert trie.draws(at(trie, 0)) == ([], [], [])
    assert trie.asked[at(trie, 0)] == 4
    assert trie.evidence.tolist() == [[0.0, 0.0], [0.0, 0.5]]


def test_draws_of_a_node_that_saw_different_things_are_no_drafts() -> None:
    draws = [Draw(0, 1, "d", DrawRule.POINT_MASS, None, 0.5, (seen,)) for seen in (0.1, 0.2)]
    with pytest.raises(IntegrityError, match="saw the same"):
        GuessRecorder().note((), 2, [1, 2], draws)


def test_nothing_recorded_is_a_trie_too() -> None:
    trie = GuessRecorder().trie()
    assert trie.complaint(0, 10) == ""
    assert trie.evidence.shape == (0, 0)
    assert np.array_equal(trie.first, [0])
