"""Distribution: next-token probabilities over a support."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The probability of each token of a support; every other token has probability 0."""

    probabilities: NDArray[np.float64]  # [support]
    ids: NDArray[np.int64] | None  # [support], ascending; None: all of vocab
    vocab: int

    def index_of(self, token: int) -> int | None:
        """Return the index of `token` in the support, or None if it is not there."""
        if self.ids is None:
            return token
        index = int(np.searchsorted(self.ids, token))
        return index if index < len(self.ids) and self.ids[index] == token else None

    def id_at(self, index: int) -> int:
        """Return the token id at an index of the support."""
        return index if self.ids is None else int(self.ids[index])

    def over(self, ids: NDArray[np.int64] | None) -> NDArray[np.float64]:
        """Return the probabilities of ascending `ids` (None: all tokens), in their order."""
        if self.ids is None:
            return self.probabilities if ids is None else self.probabilities[ids]
        if ids is None:
            dense = np.zeros(self.vocab)
            dense[self.ids] = self.probabilities
            return dense
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)

    def dense(self) -> NDArray[np.float64]:
        """Return the probability of every token, [vocab]."""
        return self.over(None)
