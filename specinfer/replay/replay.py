"""Playing traces under a policy: workloads of recorded texts, what came of them, how much quicker it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

import numpy as np

from specinfer.errors import ConfigError
from specinfer.replay.drafts import ReplayClock, ReplayedHead, replayed_drafts, speculator_of
from specinfer.replay.engine import PlayedStep, ReplayEngine
from specinfer.replay.trace import Trace
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig

_RESAMPLES: Final = 4000  # of texts, for an interval
_LEVEL: Final = (2.5, 97.5)  # percentiles

Kind = Trace | Sequence[Trace]  # texts of one kind, in one trace or in several
MakePolicy = Callable[[Trace, SpeculationConfig], SpeculationPolicy]


def cost_policy(trace: Trace, speculation: SpeculationConfig) -> SpeculationPolicy:
    """The policy of an engine whose tree_size is "cost" and clock "curve", with the trace's curves."""
    drafts = {name: draft.curve for name, draft in trace.drafts.items()}
    return CostPolicy.by_curves(trace.curve, drafts, speculation, measured=False)


def fixed_policy(trace: Trace, speculation: SpeculationConfig) -> SpeculationPolicy:
    """The policy of an engine whose tree_size is "fixed"."""
    return SpeculationPolicy()


POLICIES: Final[dict[str, MakePolicy]] = {
    "cost": cost_policy,
    "fixed": fixed_policy,
}


def speculation_of(policy: str, speculation: SpeculationConfig) -> SpeculationConfig:
    """The same of an engine that has the policy of this name."""
    return speculation.with_tree_size("fixed" if policy == "fixed" else "cost")


@dataclass(frozen=True, slots=True)
class Phase:
    """Some texts, by trace and number, of which so many are played at once."""

    texts: Sequence[tuple[Trace, int]]
    at_once: int = 1
    slowdown: float = 1.0  # of all passes, by others on the machine


def whole(kinds: Sequence[Kind], at_once: int = 1) -> list[Phase]:
    """All texts of a kind after all of the one before: of several kinds, phases."""
    return [Phase(_texts(kind), at_once) for kind in kinds]


def mixed(kinds: Sequence[Kind], at_once: int = 1) -> list[Phase]:
    """Texts of all kinds in turns, as long as each lasts."""
    rounds = zip_longest(*(_texts(kind) for kind in kinds))
    return [Phase([text for turn in rounds for text in turn if text is not None], at_once)]


def _texts(kind: Kind) -> list[tuple[Trace, int]]:
    return [
        (trace, i) for trace in ([kind] if isinstance(kind, Trace) else kind) for i in range(len(trace.texts))
    ]


@dataclass(slots=True)
class Played:
    """What playing some texts came to, by the traces' own curves; steps of one request count each."""

    tokens: int = 0  # of all texts
    seconds: float = 0.0
    passes: int = 0  # of the target: steps of the engine
    rows: int = 0  # of these
    steps: int = 0  # a request's, those left out that read its prompt or brought its first token
    step_tokens: int = 0  # what these brought
    nodes: int = 0  # that they verified, roots not counted
    draft_passes: dict[str, int] = field(default_factory=dict)
    # Trees of heads that had missed the beginning of a text, and were played as if they had read all of it.
    partly_read: int = 0
    of_texts: list[float] = field(default_factory=list)  # seconds of each, in order: its part of its steps

    @property
    def tokens_per_step(self) -> float:
        """What a step brings a request, as RequestOutput.figures counts it."""
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def play(
    parts: Sequence[Phase],
    policy: SpeculationPolicy,
    *,
    speculation: SpeculationConfig | None = None,
    on_step: Callable[[PlayedStep], None] | None = None,
    whole_trees: bool = False,
) -> Played:
    """Play parts one after the other in one engine, which learns on; what all of it came to.

    `speculation` is the traces' own, changed in whatever but the names of drafts and how they draw. With
    `whole_trees` heads grow all that was recorded, and not about as much as is verified.
    Raises ConfigError where the traces are not of the same models, TraceTooSmallError where one lacks a
    guess.
    """
    first, clock = _first(parts), ReplayClock()
    speculation = first.speculation if speculation is None else speculation
    replayed = replayed_drafts(first, clock, whole_trees=whole_trees)
    drafts = [speculator_of(draft, speculation, first) for draft in replayed.values()]
    engine = ReplayEngine(
        first,
        [*build_speculators(speculation), *drafts],
        policy,
        speculation,
        batch=max(part.at_once for part in parts),
        replayed=replayed,
        clock=clock,
    )
    played = _count(engine, parts, on_step)
    played.draft_passes = {name: one.passes for name, one in replayed.items()}
    played.partly_read = sum(one.partly_read for one in replayed.values() if isinstance(one, ReplayedHead))
    return played


def play_without(parts: Sequence[Phase]) -> Played:
    """Play parts without speculation: what others are compared with."""
    first = _first(parts)
    batch = max(part.at_once for part in parts)
    engine = ReplayEngine(first, (), SpeculationPolicy(), NO_SPECULATION, batch=batch)
    return _count(engine, parts, None)


def with_nodes(trace: Trace, nodes: int | None) -> SpeculationConfig:
    """The trace's speculation with trees of at most so many nodes; None: as many as it was recorded for."""
    return trace.speculation if nodes is None else replace(trace.speculation, max_nodes=nodes)


def _first(parts: Sequence[Phase]) -> Trace:
    traces = {id(trace): trace for part in parts for trace, _ in part.texts}
    if not traces:
        raise ConfigError("there are no texts to play; give at least one trace")
    first = next(iter(traces.values()))
    for trace in traces.values():
        same = trace.model == first.model and trace.engine == first.engine
        if not same or list(trace.drafts) != list(first.drafts):
            raise ConfigError(
                f"traces of {first.model} ({', '.join(first.drafts) or 'no draft'}) and of {trace.model} "
                f"({', '.join(trace.drafts) or 'no draft'}) are to be played together; give traces of the "
                "same models under the same engine"
            )
    return first


def _count(
    engine: ReplayEngine, parts: Sequence[Phase], on_step: Callable[[PlayedStep], None] | None
) -> Played:
    played = Played()
    begun: set[str] = set()
    played.of_texts = [0.0] * sum(len(part.texts) for part in parts)
    for part in parts:
        for step in engine.play(part.texts, part.at_once, part.slowdown):
            played.passes += 1
            played.rows += step.rows
            spent = sum(step.seconds.values())
            played.seconds += spent
            for request_id in step.requests:  # which count from 0, in the order of the texts
                played.of_texts[int(request_id)] += spent / len(step.requests)
            for entry in step.entries:
                played.tokens += len(entry.committed)
                if entry.request_id in begun:
                    played.steps += 1
                    played.step_tokens += len(entry.committed)
                    played.nodes += entry.tree.num_nodes - 1
                begun.add(entry.request_id)
            if on_step is not None:
                on_step(step)
    return played


@dataclass(frozen=True, slots=True)
class Speedup:
    """A ratio of seconds, and the 95% interval around it."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """How many times as quick `after` is as `before`, of the same texts, whose seconds these are.

    Texts are paired: which of them a workload happens to have makes both slow or quick alike. The interval
    says what other texts of the same kind would show (a bootstrap over texts). Of one text it is the ratio
    alone; the same seconds give the same interval.
    """
    seconds = np.array([before, after])  # [2, texts]
    ratio = float(seconds[0].sum() / seconds[1].sum())
    texts = seconds.shape[1]
    drawn = np.random.default_rng(0).integers(0, texts, (_RESAMPLES, texts))
    sums = seconds[:, drawn].sum(-1)
    low, high = np.percentile(sums[0] / sums[1], _LEVEL)
    return Speedup(ratio, float(low), float(high))
