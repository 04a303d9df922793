"""The default rule: the target chooses first, then we look whether the tree holds its choice.

The one idea: the choice after a text is argmax(log p + Gumbel noise), and the noise is a pure function of
(request seed, position, token id). So the text is decided by the seed and the target alone; the tree
decides only how much of it one step yields. A speculator that ranks its tokens by log q + the *same*
noise guesses well. With E = exp(-Gumbel), a unit exponential, the argmax is the winner of a race:
argmin(E / p), and P(token i wins) = p_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.tree.token_tree import TokenTree
from specinfer.verify import noise
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.law import Law, inverse_temperature, most_likely

_EXACT: Final = 256  # up to this many ids, all of them run the race
_FIRST_BLOCK: Final = 1024
_BLOCK: Final = 32768  # ids screened at a time: temporaries stay in the L2 cache
# The screen works in float32; it may keep ids that cannot win and must not drop one that can. Its errors
# (rounded hash, temperature, exp) add up to less than 2**-15 of the bound for every token that can win.
_SCREEN: Final = (1.0 + 2.0**-10) * 2.0**32


def verify_coupled(tree: TokenTree, choose: Callable[[int], int]) -> Acceptance:
    """Follow the target's choices down the tree; the first one the tree does not hold is the bonus token.

    Lossless for any tree and any draws. With the target's argmax as `choose` it is greedy verification.

    Args:
        tree: the candidates.
        choose: the target's choice after a node; called once per visited node, root first, and for no other.
    """
    children = tree.children()
    path: list[int] = []
    node = 0
    while True:
        token = choose(node)
        child = children[node].get(token)
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)
        node = child


def coupled_choice(law: Law, seed: int, position: int) -> int:
    """The token argmax(log p + noise) of `law` at the absolute `position` of the token being chosen.

    Exact, yet it takes logarithms only of ids that can still win: v <= E, so E / w < best implies
    v < w * best, and the upper half of the hash alone settles that for nearly every id. A point mass
    needs no noise, which makes greedy the same function.
    """
    if law.ids is not None and law.ids.shape[0] == 1:
        return int(law.ids[0])
    key = noise.race_key(seed, position)
    size = law.logits.shape[0]
    if size <= _EXACT:
        scores = _scores(law, np.arange(size), key)
        return law.id_at(int(scores.argmin()))
    # The likeliest token alone, then a small block, then large ones: each bounds what the next looks at.
    winner = law.top
    best = float(_scores(law, np.array([winner]), key)[0])
    hashes = noise.vocabulary_hashes(law.vocab) if law.ids is None else noise.id_hashes(law.ids)
    start, stop = 0, min(_FIRST_BLOCK, size)
    while start < size:
        block = slice(start, stop)
        highs = noise.high_halves(key, hashes[block])
        indices = np.flatnonzero(highs.astype(np.float32) <= _screen(law, block, best)) + start
        if indices.size:
            scores = _scores(law, indices, key)
            fastest = int(scores.argmin())
            if scores[fastest] < best:
                winner, best = int(indices[fastest]), float(scores[fastest])
        start, stop = stop, min(stop + _BLOCK, size)
    return law.id_at(winner)


def coupled_top_k(law: Law, seed: int, position: int, k: int, *, pool: int = 64) -> NDArray[np.int64]:
    """The k tokens with the largest log q + noise, best first: what a speculator of law q should propose.

    For the speculator it is sampling k tokens without replacement. Only the `pool` most likely tokens
    run (any proposal is lossless). Fewer than k ids come back when the law supports fewer.
    """
    if law.ids is None:
        indices = most_likely(law.logits, max(pool, k))
    else:
        indices = np.arange(min(law.ids.shape[0], max(pool, k)))
    fastest = indices[np.argsort(_scores(law, indices, noise.race_key(seed, position)), kind="stable")[:k]]
    return fastest if law.ids is None else law.ids[fastest]


def _scores(law: Law, indices: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """log(E / w) of these entries of the support: the lowest wins; w = 1 for the likeliest token."""
    ids = indices if law.ids is None else law.ids[indices]
    race = noise.exponentials_from(noise.high_halves(key, noise.id_hashes(ids)), key, ids)
    return np.asarray(np.log(race) - law.log_weights(indices))


def _screen(law: Law, block: slice, best: float) -> NDArray[np.float32]:
    """The largest upper half with which each entry of the block can still beat the score `best`."""
    weights: NDArray[np.float32] = law.logits[block] - law.logits[law.top]
    weights *= np.float32(inverse_temperature(law.temperature))
    np.exp(weights, out=weights)
    weights *= np.float32(math.exp(best) * _SCREEN)
    return weights
