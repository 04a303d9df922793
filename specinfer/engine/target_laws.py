"""Target distributions at visited nodes, and verification of trees.

Processors that depend on the path (penalties, bans, a grammar) are applied at a node with its own path, and
only at visited nodes (docs/losslessness.md, sampling parameters).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import (
    DrawRuleError,
    IntegrityError,
    LogitsError,
    PeerLostError,
    RequestError,
    UserError,
)
from specinfer.plan import PlanEntry
from specinfer.processors.changes import NOTHING, RowChanges
from specinfer.request import Logprobs
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import Move
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.draw import Verifier
from specinfer.tree.token_tree import child_of
from specinfer.verify.coupled import Acceptance
from specinfer.verify.logprobs import processed_logprobs, report
from specinfer.verify.multistep import seeded_coin, verify_multistep
from specinfer.verify.scan import NO_TOKEN, SAMPLE_REQUEST, LogitBlock, SampleRequest, sample_request
from specinfer.verify.target_law import Law, point_mass, target_law


class TargetLaws:
    """The target's distribution after each node of one request's tree, with the request's parameters."""

    def __init__(self, entry: PlanEntry, tree: TokenTree, flight: Flight, first_row: int) -> None:
        self.request = entry.request
        self.tree = tree
        self._flight = flight
        self._first_row = first_row  # the root's row among the flight's rows with logits
        self._end = entry.end
        self._num_output = entry.end - len(entry.request.prompt_token_ids)
        self._depths = tree.depths()
        self._processors = entry.active_processors
        self._ending = entry.processors.ending if entry.processors is not None else frozenset[int]()
        self.current = 0  # node whose law was computed last

    def changes(self, node: int) -> RowChanges | None:
        """Return the processors' changes of the row at `node`; None if `write_logits` must apply them."""
        if self._processors is None:
            return NOTHING
        return self._processors.changes(self.tree.path_tokens(node))

    def row(self, node: int) -> int:
        """Return the node's row in the flight's logits."""
        return self._first_row + node

    def position(self, node: int) -> int:
        """Return the absolute position of the token after `node`."""
        return self._end + self._depths[node]

    def sample_request(self, node: int) -> SampleRequest:
        """Return the sampling request of the token after `node`."""
        return sample_request(self.request.params, self.request.seed, self.position(node))

    def logits(self, node: int) -> NDArray[np.float32]:
        """Return the processed logits after `node`, [vocab]; raises RequestError if none is allowed."""
        if self._processors is None:
            return self._flight.row(self.row(node))
        processed = np.empty(self._flight.vocab, dtype=np.float32)
        self.write_logits(node, processed)
        return processed

    def write_logits(self, node: int, into: NDArray[np.float32]) -> None:
        """Write the result of `logits` to `into`, [vocab]; raises as `logits` does."""
        self._flight.copy(self.row(node), into)
        if self._processors is None:
            return
        self._processors.change(into, self.tree.path_tokens(node))
        if (
            self._processors.bans
            and into.max() == -np.inf
            and self._flight.row(self.row(node)).max() > -np.inf
        ):
            raise RequestError(
                f"{' and '.join(self._processors.bans)} leave no token to choose after "
                f"{self._num_output + self._depths[node]} tokens; relax one of them"
            )

    def law(self, node: int) -> Law:
        """Return the law of the token after `node`."""
        self.current = node
        if self.is_finished(node):
            # Verification also reads the law after the last token of a text; its result is not used.
            return point_mass(self.tree.token_ids[node], self._flight.vocab)
        return target_law(self.logits(node), self.request.params, self._flight.scan)

    def reports(
        self, nodes: Sequence[int], tokens: Sequence[int], top: int, tokenizer: Tokenizer
    ) -> list[Logprobs]:
        """Return the log-probabilities after each node, raw or processed by the request's mode."""
        params = self.request.params
        if params.logprobs_mode == "raw":
            scores = self._flight.scores([self.row(node) for node in nodes], tokens, top)
            return [scores.report(place, tokenizer.text_of) for place in range(len(nodes))]
        return [
            report(processed_logprobs(self.logits(node), params), token, top, tokenizer)
            for node, token in zip(nodes, tokens, strict=True)
        ]

    def is_finished(self, node: int) -> bool:
        """Return whether the text ends with `node`."""
        enough = self._num_output + self._depths[node] >= self.request.params.min_tokens
        return node > 0 and enough and self.tree.token_ids[node] in self._ending


def accepted_moves(entry: PlanEntry, path: Sequence[int]) -> list[Move]:
    """Return the move of the accepted nodes' K and V to the end of the text; none if they are there."""
    if all(node == depth for depth, node in enumerate(path, start=1)):
        return []
    end = entry.end
    return [
        Move(entry.block_table, [end - 1 + node for node in path], range(end, end + len(path)), entry.states)
    ]


def verify_trees(
    laws: Sequence[TargetLaws], verifier: Verifier, flight: Flight
) -> list[Acceptance | UserError]:
    """Verify each tree; returns its accepted path and bonus token, or an error.

    `verifier` is the engine's, and a request may have another. Greedy decoding is the coupled verifier's
    limit T -> 0. An error concerns only its own request. Coupled requests are verified together, with one
    scan per level.
    """
    results: list[Acceptance | UserError | None] = [None] * len(laws)
    nodes: dict[int, int] = {}  # the present node of each tree that is verified together with others
    for i, one in enumerate(laws):
        params = one.request.params
        if params.greedy or (params.speculation.verifier or verifier) == "coupled":
            nodes[i] = 0
        else:
            results[i] = _verify(one)
    while nodes:
        for i, token in _choices(laws, nodes, flight):
            one, node = laws[i], nodes.pop(i)
            if isinstance(token, UserError):
                results[i] = _dead_end(one, node, token)
            elif token == NO_TOKEN:
                results[i] = _dead_end(one, node, _error(one, node))
            elif (child := child_of(one.tree.token_ids, one.tree.parents, node, token)) is None:
                results[i] = Acceptance(one.tree.path_to(node), token)
            else:
                nodes[i] = child
    return [result for result in results if result is not None]


def _choices(
    laws: Sequence[TargetLaws], nodes: dict[int, int], flight: Flight
) -> list[tuple[int, int | UserError]]:
    """Return the target's choice after the present node of each tree, or an error.

    The choice is NO_TOKEN if the largest logit is not finite.
    """
    found: list[tuple[int, int | UserError]] = []
    changes: dict[int, RowChanges] = {}
    whole: list[int] = []
    for i, node in nodes.items():
        if laws[i].is_finished(node):  # the choice after the end is not used
            found.append((i, laws[i].tree.token_ids[node]))
        elif (changed := laws[i].changes(node)) is not None:
            changes[i] = changed
        else:
            whole.append(i)
    if changes:
        rows = [laws[i].row(nodes[i]) for i in changes]
        requests = [laws[i].sample_request(nodes[i]) for i in changes]
        tokens = flight.choices(rows, requests, list(changes.values()))
        found.extend(zip(changes, tokens, strict=True))
    if whole:  # masks over whole rows
        block_RV = np.empty((len(whole), flight.vocab), dtype=np.float32)
        there: list[int] = []
        for i in whole:
            try:
                laws[i].write_logits(nodes[i], block_RV[len(there)])
                there.append(i)
            except PeerLostError:
                raise
            except UserError as error:  # the parameters exclude every token
                found.append((i, error))
        request_array = np.array([laws[i].sample_request(nodes[i]) for i in there], dtype=SAMPLE_REQUEST)
        chosen = flight.scan.choices(LogitBlock(block_RV[: len(there)]), np.arange(len(there)), request_array)
        found.extend(zip(there, chosen.tolist(), strict=True))
    return found


def _verify(laws: TargetLaws) -> Acceptance | UserError:
    """Verify one tree by multi-step sampling."""
    try:
        coin = seeded_coin(laws.request.seed, laws.position(0))
        return verify_multistep(laws.tree, lambda node: laws.law(node).distribution(), coin)
    except PeerLostError:
        raise
    except DrawRuleError as error:
        return error
    except UserError as error:  # no token is allowed, or logits are not finite
        return _dead_end(laws, laws.current, error)


def _error(laws: TargetLaws, node: int) -> UserError:
    """Return the error of a request whose largest logit at `node` is not finite.

    The cause is the model, or processors that exclude every token.
    """
    try:
        laws.law(node)
    except (LogitsError, RequestError) as error:
        return error
    raise IntegrityError(f"no choice was made at node {node}, whose logits are good")


def _dead_end(laws: TargetLaws, node: int, error: UserError) -> Acceptance | UserError:
    """Return the error if it is at the root; else accept the path, as the next step will meet the error."""
    if node == 0:
        return error
    *path, last = laws.tree.path_to(node)
    return Acceptance(tuple(path), laws.tree.token_ids[last])
