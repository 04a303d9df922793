"""SpeculationLimits: node budget and speculators of a request."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.errors import RequestError, naming
from specinfer.request import Request
from specinfer.speculate.speculator import AnySpeculator, LevelSpeculator
from specinfer.speculation_config import SpeculationConfig


class SpeculationLimits:
    """Limits of speculation for a request, from the engine's options and the request's parameters."""

    def __init__(self, config: SpeculationConfig, speculators: Sequence[AnySpeculator]) -> None:
        self._config = config
        self._speculators = tuple(speculators)
        self.names = tuple(speculator.name for speculator in speculators)

    @naming("speculation")
    def check(self, request: Request) -> None:
        """Raise RequestError if the request's parameters do not fit this engine."""
        overrides = request.params.speculation
        for name in overrides.speculators or ():
            if name not in self.names:
                raise RequestError(
                    f"speculation.speculators names {name!r}; this engine has {', '.join(self.names)}"
                )
        if overrides.expansion is not None and not self._any_has_shape(request):
            raise RequestError(
                f"speculation.expansion is {overrides.expansion}; it is the shape of a draft model's trees, "
                "and this engine has no draft model: leave it out"
            )
        if (overrides.max_nodes or 0) > self._config.node_limit:
            raise RequestError(
                f"speculation.max_nodes is {overrides.max_nodes}; the engine allows at most "
                f"{self._config.node_limit}: lower it"
            )

    def speculators(self, request: Request) -> tuple[str, ...]:
        """Return the names of the speculators that may guess for the request, in the order they run."""
        return tuple(speculator.name for speculator, _ in self._guessing(request))

    def nodes(self, request: Request) -> int:
        """Return the request's maximum tree nodes, the root included; 1: no speculator may guess."""
        limit = request.params.speculation.max_nodes or self._config.node_limit
        return min(limit, 1 + sum(nodes for _, nodes in self._guessing(request)))

    def _guessing(self, request: Request) -> list[tuple[AnySpeculator, int]]:
        """Return the speculators that may guess for the request, each with its maximum nodes."""
        params, overrides = request.params, request.params.speculation
        if not overrides.enabled:
            return []
        named = overrides.speculators
        knows_chance = params.knows_chance(self._config.verifier)
        return [
            (speculator, nodes)
            for speculator in self._speculators
            if (named is None or speculator.name in named)
            and not (knows_chance and speculator.remembers_answers)
            and (nodes := self._max_nodes(speculator, request)) > 0
        ]

    def _max_nodes(self, speculator: AnySpeculator, request: Request) -> int:
        """Return the maximum nodes of a speculator: its own limit, or the engine's."""
        limit = speculator.max_nodes(request)
        return self._config.node_limit if limit is None else limit

    def _any_has_shape(self, request: Request) -> bool:
        """Return whether a draft or a caller's speculator may use a request's expansion."""
        return any(
            isinstance(speculator, LevelSpeculator) or speculator.max_nodes(request) is None
            for speculator in self._speculators
        )
