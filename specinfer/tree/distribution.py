"""A distribution of the next token that names only the tokens it gives any probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The probability of each token of a support; every other token of the vocabulary has none."""

    probabilities: NDArray[np.float64]  # [support]
    ids: NDArray[np.int64] | None  # [support], ascending; None: all of vocab
    vocab: int

    def place(self, token: int) -> int | None:
        """Where `token` stands in the support; None where it does not."""
        if self.ids is None:
            return token
        place = int(np.searchsorted(self.ids, token))
        return place if place < len(self.ids) and self.ids[place] == token else None

    def id_at(self, place: int) -> int:
        """The token id at a place of the support."""
        return place if self.ids is None else int(self.ids[place])

    def over(self, ids: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """The probabilities of other ids, ascending (None: of every token), in their order."""
        if self.ids is None:
            return self.probabilities if ids is None else self.probabilities[ids]
        if ids is None:
            dense = np.zeros(self.vocab)
            dense[self.ids] = self.probabilities
            return dense
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)

    def dense(self) -> NDArray[np.float64]:
        """The probability of every token, [vocab]."""
        return self.over(None)
