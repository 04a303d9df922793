"""Multi-step speculative sampling (MSS): SpecInfer's algorithm 2, over draws instead of nodes.

The one idea: at a node, p is what the target still owes. Each draw in its turn is accepted with
probability min(1, p(x) / q(x)), q being the law it was drawn from; a rejection takes from p what the draw
would have paid on average, p <- norm(max(0, p - q)). When no draw is left, the bonus token is sampled from
p. The sum over all ways to get a token is its probability under the target, whatever the laws q, as long
as every draw was *drawn* from its declared law: so the rule of a draw decides its q.

    IID                   the declared law
    WITHOUT_REPLACEMENT   the declared law without this speculator's earlier draws here, renormalised
    POINT_MASS            all mass on the token: accept with p(x), a rejection removes x from p
    COUPLED               refused: its value depends on the target's noise, so there is no such q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import DrawRuleError, IntegrityError
from specinfer.tree.distribution import Distribution
from specinfer.tree.draw import Draw, DrawRule, check_pair
from specinfer.tree.token_tree import TokenTree, draws_by_parent
from specinfer.verify import noise
from specinfer.verify.coupled import Acceptance
from specinfer.verify.law import inverse_cdf

_SUM_TOLERANCE: Final = 1e-5  # a law that was a float32 softmax passes, a forgotten normalisation does not


@dataclass(frozen=True, slots=True)
class Coin:
    """Where the verifier's chance comes from; each (depth, turn) is asked about at most once."""

    uniform: Callable[[int, int], float]  # of (depth, turn), in [0, 1), 0 possible

    def accept(self, depth: int, turn: int, p: float, q: float) -> bool:
        """True with probability min(1, p / q); never when p is 0.

        It is whether r * q < p. Strictly: with <=, r = 0 would accept a token of probability zero.
        """
        return self.uniform(depth, turn) * q < p

    def pick(self, depth: int, turn: int, weights: NDArray[np.float64]) -> int:
        """An index, with probability weights[index] / sum; never one of weight 0."""
        return inverse_cdf(weights, self.uniform(depth, turn))


def seeded_coin(seed: int, position: int) -> Coin:
    """The coin of a request whose tree's root is followed by the token at absolute `position`."""
    return Coin(lambda depth, turn: noise.uniform(seed, position + depth, turn))


def verify_multistep(
    tree: TokenTree, law: Callable[[int], Distribution | NDArray[np.float64]], coin: Coin
) -> Acceptance:
    """Walk down the tree by accepted draws; where none is accepted, sample the bonus token from what is left.

    Args:
        tree: the candidates with all their draws, in proposal order.
        law: the target's law after a node, summing to 1, as a Distribution or as [vocab] float64; called for
            visited nodes only, root first. Not mutated.
        coin: the source of chance.

    Raises DrawRuleError for a draw that cannot be treated losslessly (a coupled one, a sampled one without
    a law, a law of the wrong length or sum, or that gives its own draw no mass), and IntegrityError for a
    target law that is none.
    """
    below = draws_by_parent(tree.draws)
    path: list[int] = []
    node = 0
    while True:
        depth = len(path)
        draws = below.get(node, [])
        target = _target_law(law(node), node)
        # A token the target gives no probability is never emitted: all that follows is over its support.
        residual = target.probabilities
        accepted = None
        for turn, draw in enumerate(draws):
            proposal = _proposal(tree, draws[:turn], draw, target)
            place = target.place(tree.token_ids[draw.node])
            p, q = (0.0, 1.0) if place is None else (float(residual[place]), float(proposal[place]))
            if coin.accept(depth, turn, p, q):
                accepted = draw.node
                break
            residual = _after_rejection(residual, proposal)
        if accepted is None:
            return Acceptance(tuple(path), target.id_at(coin.pick(depth, len(draws), residual)))
        path.append(accepted)
        node = accepted


def _target_law(given: Distribution | NDArray[np.float64], node: int) -> Distribution:
    law = _as_distribution(given)
    total = float(law.probabilities.sum())
    if not _is_law(law, total):
        raise IntegrityError(
            f"the target's law after node {node}, shape {law.probabilities.shape}, sums to {total}, not to 1"
        )
    return replace(law, probabilities=law.probabilities / total)


def _proposal(
    tree: TokenTree, earlier: Sequence[Draw], draw: Draw, target: Distribution
) -> NDArray[np.float64]:
    """The law the draw was drawn from, given the draws before it at its node, over the target's support."""
    check_pair("mss", [draw.rule], draw.speculator)
    token = tree.token_ids[draw.node]
    if not 0 <= token < target.vocab:
        raise DrawRuleError(
            f"{_name(draw, token)} is outside the target's vocabulary of {target.vocab} tokens"
        )
    if not draw.rule.is_sampled:
        point = np.zeros(len(target.probabilities))
        if (place := target.place(token)) is not None:
            point[place] = 1.0
        return point
    if draw.law is None:
        raise DrawRuleError(
            f"{_name(draw, token)} carries no law; keep the law it was drawn from, as Draw.law"
        )
    law = _as_distribution(draw.law)
    if law.vocab != target.vocab:
        raise DrawRuleError(
            f"the law of {_name(draw, token)} has shape ({law.vocab},); allowed: ({target.vocab},)"
        )
    total = float(law.probabilities.sum())
    if not _is_law(law, total):
        raise DrawRuleError(f"the law of {_name(draw, token)} sums to {total}; it must be a distribution")
    place = law.place(token)
    if draw.rule is DrawRule.WITHOUT_REPLACEMENT:
        own = (d for d in earlier if (d.speculator, d.rule) == (draw.speculator, draw.rule))
        gone = [at for d in own if (at := law.place(tree.token_ids[d.node])) is not None]
        if gone:
            law = replace(law, probabilities=law.probabilities.copy())
            law.probabilities[gone] = 0.0
            total = float(law.probabilities.sum())
    if place is None or not law.probabilities[place] > 0:
        raise DrawRuleError(
            f"{_name(draw, token)} has probability zero under its own law; draw tokens from the declared law"
        )
    return law.over(target.ids) / total


def _after_rejection(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """norm(max(0, p - q)), over p's support; what the target owes once a draw from q was rejected.

    A rejected token has p < q, and both sum to 1, so some other has p > q: the sum is zero only when
    p and q are equal up to rounding, and then a rejection has a probability of the same size. p stays.
    """
    residual = p - q
    np.maximum(residual, 0.0, out=residual)
    total = float(residual.sum())
    if not total > 0:
        return p
    residual /= total
    return residual


def _as_distribution(law: Distribution | NDArray[np.float64]) -> Distribution:
    return law if isinstance(law, Distribution) else Distribution(law, None, law.shape[0])


def _is_law(law: Distribution, total: float) -> bool:
    weights = law.probabilities
    return weights.ndim == 1 and abs(total - 1) <= _SUM_TOLERANCE and float(weights.min()) >= 0


def _name(draw: Draw, token: int) -> str:
    return f"the {draw.rule} draw of token {token} by speculator {draw.speculator!r}"
