"""How many nodes one request's tree may have, and who may guess for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specinfer.config import SpeculationConfig
from specinfer.errors import RequestError
from specinfer.request import Request
from specinfer.speculate.alignment import SIDE_DEPTH
from specinfer.speculation_params import SpeculationParams

OWN = ("grammar", "prediction")  # guess for the requests that bring something to guess from, always


class TreeBudget:
    """The most nodes the speculators of a request could use, within the engine's and its own limits."""

    def __init__(self, config: SpeculationConfig, drafts: Sequence[str], extra: Sequence[str]) -> None:
        self._config = config
        self._drafts = tuple(drafts)
        self._extra = tuple(extra)  # callers' own: what they propose is not known, so they may fill the tree
        self.names = (
            *OWN,
            *self._drafts,
            *(["suffix"] if config.suffix else []),
            *(["ngram"] if config.ngram else []),
            *self._extra,
        )

    def check(self, request: Request) -> None:
        """Raise RequestError when the request wishes for what this engine cannot do."""
        wishes = request.params.speculation
        for name in wishes.speculators or ():
            if name not in self.names:
                raise RequestError(
                    f"speculation.speculators names {name!r}; this engine has {', '.join(self.names)}"
                )
        if wishes.expansion is not None and not (self._drafts or self._extra):
            raise RequestError(
                f"speculation.expansion is {wishes.expansion}; it is the shape of a draft model's trees, and "
                "this engine has no draft model: leave it out"
            )
        if (wishes.max_nodes or 0) > self._config.max_nodes:
            raise RequestError(
                f"speculation.max_nodes is {wishes.max_nodes}; the engine allows at most "
                f"{self._config.max_nodes}: lower it"
            )

    def guessers(self, request: Request) -> tuple[str, ...]:
        """The names of the speculators that may guess for the request, in the order they are asked."""
        params, wishes = request.params, request.params.speculation
        if not wishes.enabled:
            return ()
        # Earlier answers may have been made with the same seed, and then with the same chance that
        # multi-step sampling is about to use: a guess that knows it would change the law.
        chance = (wishes.verifier or self._config.verifier) == "mss" and not params.greedy
        has = {
            "grammar": params.structured_output is not None,
            "prediction": bool(request.prediction),
            "suffix": not (chance and params.seed is not None),
        }
        return tuple(
            name
            for name in self.names
            if has.get(name, True) and (wishes.speculators is None or name in wishes.speculators)
        )

    @property
    def usual_nodes(self) -> int:
        """The tree nodes of a request that asks for nothing special, the root included."""
        return self._nodes(SpeculationParams(), [name for name in self.names if name not in OWN])

    def nodes(self, request: Request) -> int:
        """The tree nodes to reserve for the request, the root included; 1: nobody guesses."""
        return self._nodes(request.params.speculation, self.guessers(request))

    def _nodes(self, wishes: SpeculationParams, guessers: Iterable[str]) -> int:
        config = self._config
        limit = wishes.max_nodes or config.max_nodes
        expansion = wishes.expansion or config.expansion
        most = {
            "grammar": config.forced_depth,
            "prediction": config.prediction_depth + (config.prediction_branches - 1) * SIDE_DEPTH,
            "ngram": config.ngram_branches * config.ngram_depth,
            "suffix": config.suffix_nodes - 1,
            **dict.fromkeys(self._drafts, expansion.num_nodes - 1),
        }
        return min(limit, 1 + sum(most.get(name, limit) for name in guessers))
