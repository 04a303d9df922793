"""What a draft learns from: texts by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specinfer.tune.shards import Corpus, TunedText


class Lessons(Protocol):
    """Texts to learn from; their number may be 0."""

    def __len__(self) -> int: ...

    def text(self, number: int) -> TunedText:
        """Read one of them."""
        ...

    @property
    def corpus(self) -> Corpus:
        """Where they are from."""
        ...


class AllLessons:
    """Every text of a corpus that is not held out, as it was collected."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return self.corpus.count(held_out=False)

    def text(self, number: int) -> TunedText:
        """Read one of them."""
        return self.corpus.text(number, held_out=False)


def first_texts(lessons: Lessons, most: int) -> Sequence[TunedText]:
    """The first texts, at most so many."""
    return [lessons.text(number) for number in range(min(most, len(lessons)))]
