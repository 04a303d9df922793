"""The target's laws at the nodes of a tree, computed where the walk goes, and the walk itself.

Everything that depends on the path (here: min_tokens) is applied at the node, with the node's own path,
and only at nodes that are visited: the sixth rule of docs/losslessness.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specinfer.plan import PlanEntry
from specinfer.runtime.sampling import target_law
from specinfer.tree import TokenTree
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.coupled import coupled_choice, verify_coupled
from specinfer.verify.law import Law
from specinfer.verify.multistep import seeded_coin, verify_multistep
from specinfer.verify.pairs import Verifier


class TargetLaws:
    """The target's processed law after each node of one request's tree."""

    def __init__(
        self, entry: PlanEntry, tree: TokenTree, logits_NV: NDArray[np.float32], ending: NDArray[np.int64]
    ) -> None:
        self.request = entry.request
        self._end = entry.end
        self._num_output = entry.end - len(entry.request.prompt_token_ids)
        self._depths = tree.depths()
        self._logits_NV = logits_NV
        self._ending = ending  # ids that may end the text, barred before min_tokens

    def position(self, node: int) -> int:
        """The absolute position of the token chosen after `node`."""
        return self._end + self._depths[node]

    def logits(self, node: int) -> NDArray[np.float32]:
        """The target's logits after `node`, [vocab], with what its path forbids at -inf."""
        logits: NDArray[np.float32] = self._logits_NV[node]
        if self._num_output + self._depths[node] < self.request.params.min_tokens:
            logits = logits.copy()
            logits[self._ending] = -np.inf
        return logits

    def law(self, node: int) -> Law:
        """The law of the token after `node`."""
        return target_law(self.logits(node), self.request.params)

    def choose(self, node: int) -> int:
        """The target's own choice after `node`: a pure function of law, seed and position."""
        return coupled_choice(self.law(node), self.request.seed, self.position(node))


def verify_tree(tree: TokenTree, laws: TargetLaws, verifier: Verifier) -> Acceptance:
    """The path of `tree` the target accepts and its bonus token; greedy is the coupled rule's T -> 0."""
    if laws.request.params.greedy or verifier is Verifier.COUPLED:
        return verify_coupled(tree, laws.choose)
    coin = seeded_coin(laws.request.seed, laws.position(0))
    return verify_multistep(tree, lambda node: laws.law(node).dense(), coin)
