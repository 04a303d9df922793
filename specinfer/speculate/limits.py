"""SpeculationLimits: node budget and speculators of a request."""

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
    def of(self, request: Request) -> tuple[tuple[str, ...], int]:
        """Return the names of the speculators that may guess for the request, and its maximum tree nodes.

        The names are in the order they run. The root is among the nodes; 1: no speculator may guess. Raises
        RequestError if the request's parameters do not fit this engine.
        """
        overrides, most = request.params.speculation, self._config.node_limit
        for name in overrides.speculators or ():
            if name not in self.names:
                raise RequestError(
                    f"speculation.speculators names {name!r}; this engine has {', '.join(self.names)}"
                )
        if overrides.expansion is not None and not any(
            # A draft or a caller's speculator may use it.
            isinstance(speculator, LevelSpeculator) or speculator.max_nodes(request) is None
            for speculator in self._speculators
        ):
            raise RequestError(
                f"speculation.expansion is {overrides.expansion}; it is the shape of a draft model's trees, "
                "and this engine has no draft model: leave it out"
            )
        if (overrides.max_nodes or 0) > most:
            raise RequestError(
                f"speculation.max_nodes is {overrides.max_nodes}; the engine allows at most {most}: lower it"
            )
        knows_chance = request.params.knows_chance(self._config.verifier)
        nodes: dict[str, int] = {}
        for speculator in self._speculators if overrides.enabled else ():
            is_named = overrides.speculators is None or speculator.name in overrides.speculators
            if is_named and not (knows_chance and speculator.remembers_answers):
                own = speculator.max_nodes(request)
                nodes[speculator.name] = most if own is None else own
        names = tuple(name for name, own in nodes.items() if own > 0)
        return names, min(overrides.max_nodes or most, 1 + sum(nodes.values()))
