"""Positions that a head has read: gaps, bounds, shared blocks and restarted requests."""

from __future__ import annotations

from typing import Any

import torch

from specinfer.plan import PlanEntry
from specinfer.runtime.features import TappedRows, TextFeatures
from specinfer.speculate.drafts.draft import CachedText, CachedTexts
from tests import plans

TEXT = [*range(40)]
HASHES = [bytes([i]) for i in range(10)]


def entry(name: str = "a", start: int = 0, **fields: Any) -> PlanEntry:
    settled: dict[str, Any] = {"block_table": range(10), "block_hashes": HASHES, "start": start, "end": 40}
    return plans.entry(TEXT, request_id=name, **{**settled, **fields})


def heard(texts: CachedTexts, start: int, count: int, **fields: Any) -> CachedText:
    """Return the text after `count` hidden states from `start` on; each state encodes its position."""
    step = entry(start=start, **fields)
    states = torch.arange(start, start + count, dtype=torch.float32)[:, None, None]
    texts.receive_states(TextFeatures(step, start, TappedRows(states, range(count))))
    return texts.of(step, step.start)


def read(texts: CachedTexts, text: CachedText, step: PlanEntry) -> list[int]:
    """Read all that waits, as a head does; the positions that were read."""
    texts.claim(text, step)
    count = text.unread.end - text.cached
    positions = [int(p) for part in text.unread.take(count) for p in part.copied().flatten()] if count else []
    text.cached += count
    return positions


def test_what_follows_is_read_in_order() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 0, 5)
    assert read(texts, text, entry()) == [0, 1, 2, 3, 4]
    heard(texts, 5, 2)
    assert read(texts, heard(texts, 7, 1), entry()) == [5, 6, 7]
    assert (text.origin, text.cached) == (0, 8)


def test_blocks_that_it_read_for_another_are_not_read_again() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 0, 10)
    read(texts, text, entry())
    texts.claim(text, entry())  # as the next step does
    other = heard(texts, 8, 3, name="b")
    assert (other.origin, other.cached, other.unread.end) == (0, 8, 11)
    # The target found only two cached blocks, so the third one is computed again.
    assert heard(texts, 4, 3, name="c").cached == 4
    changed = [HASHES[0], b"other", *HASHES[2:]]
    assert heard(texts, 8, 3, name="d", block_hashes=changed).origin == 8
    texts.forget("a")
    assert heard(texts, 8, 3, name="e").cached == 8


def test_what_is_not_made_of_the_whole_text_is_for_nobody_else() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 5, 20)
    assert text.origin == 8
    read(texts, text, entry())
    texts.claim(text, entry())
    assert heard(texts, 16, 3, name="b").origin == 16
