"""How many nodes one request's tree may have, and who may guess for it."""

from __future__ import annotations

from collections.abc import Sequence

from specinfer.errors import RequestError, naming
from specinfer.request import Request
from specinfer.speculate.speculator import AnySpeculator, LevelSpeculator
from specinfer.speculation_config import OLD_NAMES, SpeculationConfig


class SpeculationLimits:
    """What the speculators of an engine may do for a request, within the engine's and its own limits."""

    def __init__(self, config: SpeculationConfig, speculators: Sequence[AnySpeculator]) -> None:
        self._config = config
        self._speculators = tuple(speculators)
        self.names = tuple(speculator.name for speculator in speculators)

    @naming("speculation")
    def check(self, request: Request) -> None:
        """Raise RequestError when the request asks for something this engine does not have."""
        overrides = request.params.speculation
        for name in overrides.speculators or ():
            if self._new_name(name) not in self.names:
                raise RequestError(
                    f"speculation.speculators names {name!r}; this engine has {', '.join(self.names)}"
                )
        if overrides.expansion is not None and not self._any_has_shape(request):
            raise RequestError(
                f"speculation.expansion is {overrides.expansion}; it is the shape of a draft model's trees, "
                "and this engine has no draft model: leave it out"
            )
        if (overrides.max_nodes or 0) > self._config.most_nodes:
            raise RequestError(
                f"speculation.max_nodes is {overrides.max_nodes}; the engine allows at most "
                f"{self._config.most_nodes}: lower it"
            )

    def speculators(self, request: Request) -> tuple[str, ...]:
        """The names of the speculators that may guess for the request, in the order they are asked."""
        return tuple(speculator.name for speculator, _ in self._guessing(request))

    def nodes(self, request: Request) -> int:
        """The tree nodes to reserve for the request, the root included; 1: nobody guesses."""
        limit = request.params.speculation.max_nodes or self._config.most_nodes
        return min(limit, 1 + sum(most for _, most in self._guessing(request)))

    def _guessing(self, request: Request) -> list[tuple[AnySpeculator, int]]:
        """The speculators that may guess for the request, each with the most nodes it may propose."""
        params, overrides = request.params, request.params.speculation
        if not overrides.enabled:
            return []
        named = self._named(overrides.speculators)
        known_chance = params.knows_chance(self._config.verifier)
        return [
            (speculator, most)
            for speculator in self._speculators
            if (named is None or speculator.name in named)
            and not (known_chance and speculator.remembers_answers)
            and (most := self._most_nodes(speculator, request)) > 0
        ]

    def _named(self, names: Sequence[str] | None) -> set[str] | None:
        """The speculators that a request names; None: all."""
        return None if names is None else {self._new_name(name) for name in names}

    def _new_name(self, name: str) -> str:
        """What a speculator is called now, unless the engine has one of that name."""
        return name if name in self.names else OLD_NAMES.get(name, name)

    def _most_nodes(self, speculator: AnySpeculator, request: Request) -> int:
        """The nodes a speculator may propose: those it needs, or all of a tree's."""
        most = speculator.most_nodes(request)
        return self._config.most_nodes if most is None else most

    def _any_has_shape(self, request: Request) -> bool:
        """Whether a draft or a caller's own speculator may heed a request's expansion."""
        return any(
            isinstance(speculator, LevelSpeculator) or speculator.most_nodes(request) is None
            for speculator in self._speculators
        )
