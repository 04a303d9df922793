"""Coupled verification, the default, and the Acceptance that every verifier returns.

The target chooses a token first; the verifier (engine/target_laws.py) then looks it up in the tree. The first
choice that is not in the tree is the bonus token.

The choice after a text is argmax(log p + Gumbel noise), where the noise is a pure function of (request seed,
position, token id). So the seed and the target alone determine the text, and the tree determines only how
many tokens one step yields. A speculator that ranks its tokens by log q + the *same* noise guesses well.
With E = exp(-Gumbel), a unit exponential, the argmax is the winner of a race: argmin(E / p), and
P(token i wins) = p_i.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.tree.token_tree import TokenTree
from specinfer.verify import noise
from specinfer.verify.target_law import NUMPY_ROW, Law, RowScan, race_scores

POOL: Final = 64  # likeliest tokens of a speculator that take part in its race


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path and the bonus token."""

    path: tuple[int, ...]  # accepted nodes from below the root down; empty if none is accepted
    next_token: int  # the bonus token, which the target chooses after the last node of the path

    def tokens(self, tree: TokenTree) -> tuple[int, ...]:
        """Return the token ids to commit: the path's, then the bonus token."""
        return (*(tree.token_ids[node] for node in self.path), self.next_token)


def coupled_choice(law: Law, seed: int, position: int, scan: RowScan = NUMPY_ROW) -> int:
    """Return the token argmax(log p + noise) of `law` for the absolute `position`.

    A point mass, as in greedy decoding, needs no noise.
    """
    if law.ids is not None and law.ids.shape[0] == 1:
        return int(law.ids[0])
    key = noise.race_key(seed, position)
    racers = scan.racers(law, key)
    winner = 0 if racers.shape[0] == 1 else int(race_scores(law, racers, key).argmin())
    return law.id_at(int(racers[winner]))


def coupled_top_k(
    law: Law, seed: int, position: int, k: int, *, scan: RowScan = NUMPY_ROW
) -> NDArray[np.int64]:
    """Return the k tokens with the largest log q + noise, best first: a speculator's proposals from law q.

    This samples k tokens without replacement. Only the POOL likeliest tokens take part, which is lossless
    as any proposal is. Returns fewer than k ids if the support is smaller.
    """
    first = fastest(law, scan.most_likely(law.logits, max(POOL, k)), seed, position, k)
    return first if law.ids is None else law.ids[first]


def fastest(law: Law, entries: NDArray[np.int64], seed: int, position: int, k: int) -> NDArray[np.int64]:
    """Return the k entries of the support with the largest log q + noise, best first, among `entries`."""
    scores = race_scores(law, entries, noise.race_key(seed, position))
    return entries[np.argsort(scores, kind="stable")[:k]]
