"""What a policy is compared with: the best fixed choice in hindsight, and one that knows the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from specinfer.config import SWITCHES, SpeculationConfig
from specinfer.replay.fixed_policies import CutPolicy
from specinfer.replay.oracle import oracle
from specinfer.replay.replay import Part, Played, play, play_without

NODES: Final = (2, 4, 8, 16, 32)  # of a tree, the root included


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """Who guesses, how deep drafts do, and how many nodes are verified; the same in every step."""

    speculators: tuple[str, ...]
    depth: int  # of drafts' trees; 0: none takes part
    nodes: int  # of a request's tree, the root included


def fixed_choices(
    parts: Sequence[Part], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> Iterator[FixedChoice]:
    """Each speculator alone and all together, at every depth of the expansion and in every size."""
    drafts = tuple(parts[0].texts[0][0].drafts)
    lookups = tuple(name for name in SWITCHES if getattr(speculation, name))
    alone = [(name,) for name in (*drafts, *lookups)]
    together = [(*drafts, *lookups)] if len(alone) > 1 else []
    for names in (*alone, *together):
        depths = range(1, speculation.fixed_expansion.depth + 1) if set(names) & set(drafts) else (0,)
        for depth in depths:
            for most in nodes:
                # A chain of drafts and nothing else cannot fill more nodes than its full tree has.
                yield FixedChoice(names, depth, most)


def play_fixed(parts: Sequence[Part], speculation: SpeculationConfig, choice: FixedChoice) -> Played:
    """Play parts with one fixed choice."""
    switches: dict[str, Any] = {name: name in choice.speculators for name in SWITCHES}
    nodes = max(speculation.max_nodes, choice.nodes)
    limited = replace(speculation.with_tree_size("fixed"), **switches, max_nodes=nodes)
    return play(parts, CutPolicy(choice.speculators, choice.depth, choice.nodes), speculation=limited)


def best_fixed(
    parts: Sequence[Part], speculation: SpeculationConfig, nodes: Sequence[int] = NODES
) -> tuple[FixedChoice | None, Played | None]:
    """The quickest fixed choice in hindsight, and what it comes to; None where nobody can guess."""
    best: tuple[FixedChoice | None, Played | None] = (None, None)
    for choice in fixed_choices(parts, speculation, nodes):
        played = play_fixed(parts, speculation, choice)
        if best[1] is None or played.seconds < best[1].seconds:
            best = choice, played
    return best


def play_oracle(parts: Sequence[Part], speculation: SpeculationConfig) -> Played:
    """Play parts under the policy that knows their texts, or without speculation where that is quicker.

    The plan takes it that all requests of a batch do the same; where they part, a plan that gains little may
    lose.
    """
    planned = play(parts, oracle(parts, speculation), speculation=speculation)
    return min(planned, play_without(parts), key=lambda played: played.seconds)
