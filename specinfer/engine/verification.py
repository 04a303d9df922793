"""The target's laws at the nodes of a tree, computed where the walk goes, and the walk itself.

Everything that depends on the path (penalties, bans, a grammar) is applied at the node, with the node's own
path, and only at nodes that are visited: the sixth rule of docs/losslessness.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import RequestError
from specinfer.plan import PlanEntry
from specinfer.runtime.logprobs import processed_logprobs, raw_logprobs
from specinfer.runtime.sampling import point_mass, target_law
from specinfer.tree import TokenTree
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.coupled import coupled_choice, verify_coupled
from specinfer.verify.law import Law
from specinfer.verify.multistep import seeded_coin, verify_multistep
from specinfer.verify.pairs import Verifier
from specinfer.verify.scan import NUMPY, Scan


class TargetLaws:
    """The target's law after each node of one request's tree, as the request's parameters make it."""

    def __init__(
        self,
        entry: PlanEntry,
        tree: TokenTree,
        logits_NV: Sequence[NDArray[np.float32]],
        scan: Scan = NUMPY,
    ) -> None:
        self.request = entry.request
        self._tree = tree
        self._end = entry.end
        self._num_output = entry.end - len(entry.request.prompt_token_ids)
        self._depths = tree.depths()
        self._logits_NV = logits_NV
        self._scan = scan
        self._processors = entry.active_processors
        self._ending = entry.processors.ending if entry.processors is not None else frozenset[int]()
        self.asked = 0  # the node whose law was wanted last

    def position(self, node: int) -> int:
        """The absolute position of the token chosen after `node`."""
        return self._end + self._depths[node]

    def logits(self, node: int) -> NDArray[np.float32]:
        """The target's logits after `node`, [vocab], as the processors leave them.

        Raises RequestError when they leave no token.
        """
        logits_V = self._logits_NV[node]
        if self._processors is None:
            return logits_V
        processed = self._processors.apply(logits_V, self._tree.path_tokens(node))
        if processed.max() == -np.inf and logits_V.max() > -np.inf:
            raise RequestError(
                f"{' and '.join(self._processors.bans)} leave no token to choose after "
                f"{self._num_output + self._depths[node]} tokens; relax one of them"
            )
        return processed

    def law(self, node: int) -> Law:
        """The law of the token after `node`."""
        self.asked = node
        if self.is_over(node):
            # The walk asks once more behind the last token of a text; nobody will see the answer.
            return point_mass(self._tree.token_ids[node], len(self._logits_NV[node]))
        return target_law(self.logits(node), self.request.params, self._scan)

    def choose(self, node: int) -> int:
        """The target's own choice after `node`: a pure function of law, seed and position."""
        return coupled_choice(self.law(node), self.request.seed, self.position(node), self._scan)

    def logprobs(self, node: int) -> NDArray[np.float64]:
        """Log-probabilities of the token after `node`, [vocab], raw or processed as the request says."""
        if self.request.params.logprobs_mode == "raw":
            return raw_logprobs(self._logits_NV[node])
        return processed_logprobs(self.logits(node), self.request.params)

    def is_over(self, node: int) -> bool:
        """Whether the text ends with `node`."""
        enough = self._num_output + self._depths[node] >= self.request.params.min_tokens
        return node > 0 and enough and self._tree.token_ids[node] in self._ending


def verify_tree(tree: TokenTree, laws: TargetLaws, verifier: Verifier) -> Acceptance:
    """The path of `tree` the target accepts and its bonus token; greedy is the coupled rule's T -> 0.

    `verifier` is the engine's; a request may have asked for another. Where the request's parameters leave no
    token below the root, the tokens up to there are text all the same: the next step starts at the dead end.
    Raises RequestError when it is at the root, DrawRuleError for draws the verifier cannot treat.
    """
    try:
        return _walk(tree, laws, verifier)
    except RequestError:
        if laws.asked == 0:
            raise
        *path, last = tree.path_to(laws.asked)
        return Acceptance(tuple(path), tree.token_ids[last])


def _walk(tree: TokenTree, laws: TargetLaws, verifier: Verifier) -> Acceptance:
    params = laws.request.params
    if params.speculation.verifier is not None:
        verifier = Verifier(params.speculation.verifier)
    if params.greedy or verifier is Verifier.COUPLED:
        return verify_coupled(tree, laws.choose)
    coin = seeded_coin(laws.request.seed, laws.position(0))
    return verify_multistep(tree, lambda node: laws.law(node).distribution(), coin)
