"""SpeculationParams: what one request asks of speculation; it changes its speed, never its law."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from specinfer.errors import ConfigError, RequestError, naming
from specinfer.tree.expansion import Expansion
from specinfer.tree.pairs import PAIRS, Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """What one request asks of speculation; None keeps the engine's setting.

    With the coupled verifier, greedy or seeded text is the same whatever is asked here. Raises RequestError
    on a value outside its range; whether the named speculators exist is checked when the request arrives.
    """

    enabled: bool = True  # False: one-node trees, ordinary decoding
    max_nodes: int | None = None  # of a step's tree, the root included; at most the engine's max_nodes
    expansion: Expansion | None = None  # <k1,k2,...> of its draft models' trees
    speculators: tuple[str, ...] | None = None  # only these may guess: draft, lookup, ...
    verifier: Verifier | None = None  # coupled or mss; drafts then draw by that verifier's own rule

    @naming("speculation")
    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise RequestError(f"speculation.enabled is {self.enabled!r}; allowed: true or false")
        nodes = self.max_nodes
        if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1):
            raise RequestError(
                f"speculation.max_nodes is {nodes!r}; allowed: an integer >= 1, the root included"
            )
        if self.expansion is not None:
            object.__setattr__(self, "expansion", _expansion(self.expansion))
        if self.speculators is not None:
            object.__setattr__(self, "speculators", _speculators(self.speculators))
        if self.verifier is not None and self.verifier not in tuple(PAIRS):
            raise RequestError(f"speculation.verifier is {self.verifier!r}; allowed: {', '.join(PAIRS)}")

    @classmethod
    @naming("speculation")
    def of(cls, value: object) -> SpeculationParams:
        """What `SamplingParams.speculation` may be given as: these params, their mapping, a bool, or None."""
        if isinstance(value, SpeculationParams):
            return value
        if value is None:
            return cls()
        if isinstance(value, bool):
            return cls(enabled=value)
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise RequestError(
                f"speculation is {value!r}; allowed: true, false, or a mapping of {', '.join(known)}"
            )
        for key in value:
            if key not in known:
                raise RequestError(f"speculation has no option {key!r}; allowed: {', '.join(known)}")
        return cls(**cast(Mapping[str, Any], value))


def _expansion(value: object) -> Expansion:
    try:
        return Expansion.of(value)
    except ConfigError as error:
        raise RequestError(f"speculation.{error}") from None


def _speculators(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or any(not isinstance(name, str) or not name for name in names):
        raise RequestError(
            f"speculation.speculators is {value!r}; allowed: names of speculators, at least one; "
            "to switch speculation off, set enabled to false"
        )
    return names
