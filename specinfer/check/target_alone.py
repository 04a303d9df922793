"""The target's logits by the plainest way there is: text in, one pass, no tree and no speculator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.models.language_model import LanguageModel
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.executor import ModelRunner, as_rows

_MAX_ROWS = 512  # of one pass


class TargetAlone:
    """One model asked what comes after texts; nothing is kept between questions."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def logits_after(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The logits of the token after each text, [len(texts), vocab]; no text may be empty."""
        found = [self._several(part) if len(part) > 1 else self._one(part[0]) for part in _parts(texts)]
        return np.concatenate(found)

    def _several(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        runner = self._runner(len(texts), max(map(len, texts)))
        return as_rows(
            runner.forward([chain_rows(text, 0, [block], logits=True) for block, text in enumerate(texts)])
        )

    def logits_along(self, text: Sequence[int], start: int) -> NDArray[np.float32]:
        """The logits after text[:start], text[:start + 1], ... and the whole text.

        Shape [len(text) - start + 1, vocab]; 1 <= start <= len(text).
        """
        assert 1 <= start <= len(text), (start, len(text))
        runner = self._runner(1, len(text))
        found: list[NDArray[np.float32]] = []
        for first in range(0, len(text), _MAX_ROWS):
            chunk = text[first : first + _MAX_ROWS]
            wanted = min(max(start - 1 - first, 0), len(chunk))
            logits = runner.forward([Rows(chunk, first, [0], wanted)])
            if wanted < len(chunk):
                found.append(as_rows(logits))
        return np.concatenate(found)

    def _one(self, text: Sequence[int]) -> NDArray[np.float32]:
        return self.logits_along(text, len(text))

    def _runner(self, num_blocks: int, block_size: int) -> ModelRunner:
        return ModelRunner(self.model, num_blocks=num_blocks, block_size=block_size)


def _parts(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Neighbouring texts that fit one pass together; a longer one stands alone."""
    part: list[Sequence[int]] = []
    rows = 0
    for text in texts:
        if part and rows + len(text) > _MAX_ROWS:
            yield part
            part, rows = [], 0
        part.append(text)
        rows += len(text)
    if part:
        yield part
