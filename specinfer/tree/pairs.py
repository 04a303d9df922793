"""The pairs of draw and verify rules: what each verifier may treat, and what drafts may do for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from specinfer.errors import DrawRuleError
from specinfer.tree.draw import DrawRule

# The verify rules. coupled: the target's own seeded choice, then a look whether the tree holds it; mss:
# multi-step speculative sampling (SpecInfer, algorithm 2).
Verifier = Literal["coupled", "mss"]
DraftDraw = Literal["coupled", "top_k", "iid", "without_replacement"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The draw rules that go with one verifier."""

    accepted: frozenset[DrawRule]  # for which it is lossless, whoever draws (docs/losslessness.md)
    draws: Mapping[str, DrawRule]  # those that draft models may use, by option name; the default first


# The coupled rule never looks at a draw. Multi-step sampling needs the law a value was drawn from, and a
# coupled draw has none that is independent of the target's noise. The top-k of a draft model is a point mass
# whichever verifier looks at it.
PAIRS: Final[Mapping[Verifier, Pairs]] = MappingProxyType(
    {
        "coupled": Pairs(frozenset(DrawRule), {"coupled": DrawRule.COUPLED, "top_k": DrawRule.POINT_MASS}),
        "mss": Pairs(
            frozenset({DrawRule.POINT_MASS, DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT}),
            {
                "without_replacement": DrawRule.WITHOUT_REPLACEMENT,
                "iid": DrawRule.IID,
                "top_k": DrawRule.POINT_MASS,
            },
        ),
    }
)


def draw_rule(verifier: Verifier | None, usual: DrawRule | None = None) -> DrawRule:
    """How a draft draws for `verifier`: as usual where that is lossless, else by the verifier's own rule."""
    if verifier is None and usual is not None:
        return usual
    rules = tuple(PAIRS[verifier or "coupled"].draws.values())
    return usual if usual in rules else rules[0]


def check_pair(verifier: Verifier, rules: Iterable[DrawRule], speculator: str) -> None:
    """Raise DrawRuleError unless `verifier` is lossless for all draw rules `speculator` uses."""
    allowed = PAIRS[verifier].accepted
    for rule in rules:
        if rule not in allowed:
            raise DrawRuleError(
                f"speculator {speculator!r} proposes {rule} draws, which verifier '{verifier}' cannot treat "
                f"losslessly; it takes {', '.join(sorted(allowed))}; use one of these or verifier 'coupled'"
            )
