"""Multi-step speculative sampling (MSS): SpecInfer's algorithm 2, over draws instead of nodes.

At a node, p starts as the target's distribution. Each draw in turn is accepted with probability
min(1, p(x) / q(x)), where q is the distribution it was drawn from. A rejection replaces p by the residual
norm(max(0, p - q)). After the last draw, the bonus token is sampled from p. The probabilities of all ways to
emit a token sum to its probability under the target for any q, provided that every draw was *drawn* from its
declared distribution. So the draw rule determines q:

    IID                   the declared law
    WITHOUT_REPLACEMENT   the declared law without this speculator's earlier draws here, renormalized
    POINT_MASS            all mass on the token: accept with p(x), a rejection removes x from p
    COUPLED               refused: its value depends on the target's noise, so there is no such q
"""

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
from specinfer.verify.target_law import inverse_cdf

_SUM_TOLERANCE: Final = 1e-5  # a float32 softmax passes, a distribution that is not normalized does not


@dataclass(frozen=True, slots=True)
class Coin:
    """The verifier's random numbers, each (depth, turn) used at most once."""

    uniform: Callable[[int, int], float]  # (depth, turn) -> a number in [0, 1), 0 included

    def accept(self, depth: int, turn: int, p: float, q: float) -> bool:
        """Return True with probability min(1, p / q), and never if p is 0.

        The test is r * q < p. It is strict: with <=, r = 0 would accept a token of probability 0.
        """
        return self.uniform(depth, turn) * q < p

    def pick(self, depth: int, turn: int, weights: NDArray[np.float64]) -> int:
        """Return an index with probability weights[index] / sum, never one of weight 0."""
        return inverse_cdf(weights, self.uniform(depth, turn))


def seeded_coin(seed: int, position: int) -> Coin:
    """Return the coin of a request; the token after the tree's root has the absolute `position`."""
    return Coin(lambda depth, turn: noise.uniform(seed, position + depth, turn))


def verify_multistep(
    tree: TokenTree, law: Callable[[int], Distribution | NDArray[np.float64]], coin: Coin
) -> Acceptance:
    """Walk down the tree by accepted draws; at the end, sample the bonus token from the residual.

    Args:
        tree: the candidates with all their draws, in proposal order.
        law: returns the target's distribution after a node, as a Distribution or as [vocab] float64 that sums
            to 1; called for visited nodes only, root first. Not mutated.
        coin: the random numbers.

    Raises:
        DrawRuleError: a draw cannot be verified losslessly: it is coupled, sampled without a law, or its law
            has the wrong length or sum or gives the drawn token probability 0.
        IntegrityError: the target's distribution does not sum to 1.
    """
    below = draws_by_parent(tree.draws)
    path: list[int] = []
    node = 0
    while True:
        depth = len(path)
        draws = below.get(node, [])
        target = _target_law(law(node), node)
        # Tokens outside the target's support are never emitted, so the residual is kept over the support.
        residual = target.probabilities
        accepted = None
        for turn, draw in enumerate(draws):
            proposal = _proposal(tree, draws[:turn], draw, target)
            index = target.index_of(tree.token_ids[draw.node])
            p, q = (0.0, 1.0) if index is None else (float(residual[index]), float(proposal[index]))
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
    """Return the draw's distribution, given the earlier draws at its node, over the target's support."""
    check_pair("mss", [draw.rule], draw.speculator)
    token = tree.token_ids[draw.node]
    if not 0 <= token < target.vocab:
        raise DrawRuleError(
            f"{_name(draw, token)} is outside the target's vocabulary of {target.vocab} tokens"
        )
    if not draw.rule.is_sampled:
        point = np.zeros(len(target.probabilities))
        if (index := target.index_of(token)) is not None:
            point[index] = 1.0
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
    index = law.index_of(token)
    if draw.rule is DrawRule.WITHOUT_REPLACEMENT:
        own = (d for d in earlier if (d.speculator, d.rule) == (draw.speculator, draw.rule))
        gone = [at for d in own if (at := law.index_of(tree.token_ids[d.node])) is not None]
        if gone:
            law = replace(law, probabilities=law.probabilities.copy())
            law.probabilities[gone] = 0.0
            total = float(law.probabilities.sum())
    if index is None or not law.probabilities[index] > 0:
        raise DrawRuleError(
            f"{_name(draw, token)} has probability zero under its own law; draw tokens from the declared law"
        )
    return law.over(target.ids) / total


def _after_rejection(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the residual norm(max(0, p - q)) over p's support, after a draw from q was rejected.

    A rejected token has p < q, and both sum to 1, so another token has p > q. The residual is 0 only if p and
    q are equal up to rounding. A rejection is then as improbable as the rounding, and p is returned.
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
