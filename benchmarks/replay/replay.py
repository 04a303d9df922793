"""Replays traces under a policy: workloads of recorded texts, their results and speedups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import numpy as np

from benchmarks.replay.drafts import ReplayClock, ReplayedHead, replayed_drafts, speculator_of
from benchmarks.replay.engine import PlayedStep, ReplayEngine
from benchmarks.replay.trace import Trace
from specinfer.errors import ConfigError
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig

_RESAMPLES: Final = 4000  # resamples of texts per interval
_LEVEL: Final = (2.5, 97.5)  # percentiles

Kind = Trace | Sequence[Trace]  # texts of one kind, in one trace or several
MakePolicy = Callable[[Trace, SpeculationConfig], SpeculationPolicy]


def cost_policy(trace: Trace, speculation: SpeculationConfig) -> SpeculationPolicy:
    """Return the policy of an engine with tree_size "cost" and clock "curve", on the trace's curves."""
    drafts = {name: draft.curve for name, draft in trace.drafts.items()}
    return CostPolicy.by_curves(trace.curve, drafts, speculation, measured=False)


def fixed_policy(trace: Trace, speculation: SpeculationConfig) -> SpeculationPolicy:
    """Return the policy of an engine with tree_size "fixed"."""
    return SpeculationPolicy()


POLICIES: Final[dict[str, MakePolicy]] = {
    "cost": cost_policy,
    "fixed": fixed_policy,
}


def speculation_of(policy: str, speculation: SpeculationConfig) -> SpeculationConfig:
    """Return the speculation config of an engine with the policy of this name."""
    return speculation.with_tree_size("fixed" if policy == "fixed" else "cost")


@dataclass(frozen=True, slots=True)
class Phase:
    """Texts, by trace and number; `at_once` are played concurrently."""

    texts: Sequence[tuple[Trace, int]]
    at_once: int = 1
    slowdown: float = 1.0  # factor on all seconds, caused by other processes


def whole(kinds: Sequence[Kind], at_once: int = 1) -> list[Phase]:
    """Return all texts of each kind, one kind after the other."""
    return [Phase(_texts(kind), at_once) for kind in kinds]


def mixed(kinds: Sequence[Kind], at_once: int = 1) -> list[Phase]:
    """Return texts of all kinds, alternating until each kind ends."""
    rounds = zip_longest(*(_texts(kind) for kind in kinds))
    return [Phase([text for turn in rounds for text in turn if text is not None], at_once)]


def _texts(kind: Kind) -> list[tuple[Trace, int]]:
    return [
        (trace, i) for trace in ([kind] if isinstance(kind, Trace) else kind) for i in range(len(trace.texts))
    ]


@dataclass(slots=True)
class Played:
    """Totals of playing some texts, by the traces' curves; steps are counted per request."""

    tokens: int = 0  # of all texts
    seconds: float = 0.0
    passes: int = 0  # target passes: steps of the engine
    rows: int = 0  # of these passes
    steps: int = 0  # per request; without steps that prefill or give the first token
    step_tokens: int = 0  # tokens of these steps
    nodes: int = 0  # verified nodes, roots excluded
    draft_passes: dict[str, int] = field(default_factory=dict)
    # Head trees played in full although the head had not read the text's beginning.
    partly_read: int = 0
    of_texts: list[float] = field(default_factory=list)  # seconds of each text: its share of its steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of a request, as RequestOutput.figures counts them."""
        return self.step_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0


def play(
    parts: Sequence[Phase],
    policy: SpeculationPolicy,
    *,
    speculation: SpeculationConfig | None = None,
    on_step: Callable[[PlayedStep], None] | None = None,
    whole_trees: bool = False,
) -> Played:
    """Play parts in order in one engine, which keeps learning, and return the totals.

    `speculation` is the traces' own, changed in anything but the names of drafts and their draw rule. With
    `whole_trees` heads grow all recorded nodes, otherwise about the verified number. Raises ConfigError for
    traces of different models, TraceTooSmallError for a proposal that was not recorded.
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
    """Play parts without speculation, as the baseline."""
    first = _first(parts)
    batch = max(part.at_once for part in parts)
    engine = ReplayEngine(first, (), SpeculationPolicy(), NO_SPECULATION, batch=batch)
    return _count(engine, parts, None)


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
            for request_id in step.requests:  # ids count from 0, in the order of the texts
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
    """A ratio of seconds and its 95% interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


def speedup(before: Sequence[float], after: Sequence[float]) -> Speedup:
    """Return how many times as fast `after` is as `before`, both in seconds of the same texts.

    Texts are paired, as a slow text is slow in both. The interval is a bootstrap over texts: the range for
    other texts of the same kind. With one text it is the ratio itself; equal seconds give equal intervals.
    """
    seconds = np.array([before, after])  # [2, texts]
    ratio = float(seconds[0].sum() / seconds[1].sum())
    texts = seconds.shape[1]
    drawn = np.random.default_rng(0).integers(0, texts, (_RESAMPLES, texts))
    sums = seconds[:, drawn].sum(-1)
    low, high = np.percentile(sums[0] / sums[1], _LEVEL)
    return Speedup(ratio, float(low), float(high))
