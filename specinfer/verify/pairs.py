"""Which verifier may treat which draws: the draw rule and the verify rule are a pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from specinfer.errors import DrawRuleError
from specinfer.tree.draw import DrawRule


class Verifier(StrEnum):
    """The verify rules."""

    COUPLED = "coupled"  # the target's own seeded choice, then a look whether the tree holds it
    MULTISTEP = "mss"  # multi-step speculative sampling (SpecInfer, algorithm 2)


# The coupled rule never looks at a draw. Multi-step sampling needs the law a value was drawn from, and a
# coupled draw has none that is independent of the target's noise.
ACCEPTED_RULES: Final[Mapping[Verifier, frozenset[DrawRule]]] = MappingProxyType(
    {
        Verifier.COUPLED: frozenset(DrawRule),
        Verifier.MULTISTEP: frozenset({DrawRule.POINT_MASS, DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT}),
    }
)

SAMPLED_RULES: Final = frozenset({DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT})


def check_pair(verifier: Verifier, rules: Iterable[DrawRule], speculator: str) -> None:
    """Raise DrawRuleError unless `verifier` is lossless for all draw rules `speculator` uses."""
    allowed = ACCEPTED_RULES[verifier]
    for rule in rules:
        if rule not in allowed:
            raise DrawRuleError(
                f"speculator {speculator!r} proposes {rule} draws, which verifier '{verifier}' cannot treat "
                f"losslessly; it takes {', '.join(sorted(allowed))}; use one of these or verifier 'coupled'"
            )
