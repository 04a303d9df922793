"""What else might tell how likely a guess is: other features, each beside those that there are.

    python benchmarks/policy_features.py --traces chat.npz code.npz maths.npz --out RESULT.md

Of each trace (`specinfer trace record`) all guesses below the text that the policy with counts was shown, in
their order. A logistic like the engine's (specinfer/speculate/policy/logistic.py), one for each speculator,
says how likely each is before it learns what became of it: with the features that there are, and with one
more, whose weight begins at 0. Of each trace all the others are learnt from first, three times over.

    depth    how deep the guess lies below the root
    rank     which of its speculator's choices there it is, beyond first or later
    length   lookups: how many tokens matched
    root     how unsure the target was of the token at the root
    own      how often the speculator's first choices were right in this text, beside all texts
    all      all of these

What counts is the log-loss, with a 95% interval over texts, which are paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from policy_estimator import Place, on_one_clock, shown
from study import Study, parser, row, run

from specinfer.replay.paired import speedup
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.speculate.policy.features import NAMES, features_of
from specinfer.speculate.policy.logistic import HEAVIEST, PACE, UNSURE
from specinfer.speculate.policy.priors import prior
from specinfer.tree import Draw

MORE: Final = ("depth", "rank", "length", "root", "own")
SETS: Final[Mapping[str, tuple[str, ...]]] = {"now": (), **{name: (name,) for name in MORE}, "all": MORE}
TIMES: Final = 3  # that other traces are learnt from
DEEPEST: Final = 8  # what is deeper is as deep
LONGEST: Final = 16  # tokens that match; more are as many
THOUGHT: Final = 4.0  # first choices a text is thought to have had, as often right as those of all texts

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Rates:
    """How often each speculator's first choices were right, in each text and in all, so far."""

    of_all: dict[str, tuple[float, float]] = field(default_factory=dict)  # right ones, and all
    of_text: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def beside_all(self, speculator: str, text: str) -> float:
        """By how much a text's log-odds exceed those of all texts, between -2 and 2."""
        right, tries = self.of_all.get(speculator, (0.0, 0.0))
        usual = (right + 1) / (tries + 2)
        own, count = self.of_text.get((speculator, text), (0.0, 0.0))
        rate = (own + THOUGHT * usual) / (count + THOUGHT)
        return max(-2.0, min(2.0, log_odds(rate) - log_odds(usual)))

    def learn(self, place: Place) -> None:
        """Count what became of the first choice of each speculator at a place."""
        for name, draw in {one.speculator: one for one in reversed(place.draws)}.items():
            hit = float(draw.node == place.accepted)
            right, tries = self.of_all.get(name, (0.0, 0.0))
            self.of_all[name] = right + hit, tries + 1
            own, count = self.of_text.get((name, place.request), (0.0, 0.0))
            self.of_text[name, place.request] = own + hit, count + 1


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, nargs="+", required=True, metavar="TRACE", help="played")
    args = options.parse_args()
    traces, _ = on_one_clock([read_trace(path) for path in args.traces], len(args.traces))
    settings = {"model": traces[0].model, "traces": [path.name for path in args.traces]}
    study = Study("policy_features", args.out, settings)
    known = [(trace, shown(trace)) for trace in traces]
    for number, path in enumerate(args.traces):
        if path.stem not in study.cells:
            study.keep(path.stem, measured(*known[number], known[:number] + known[number + 1 :]))
            print(row_of(path.stem, study.cells[path.stem]), flush=True)
    study.write(page(study.cells, traces[0]))


def measured(
    trace: Trace, places: Sequence[Place], before: Sequence[tuple[Trace, Sequence[Place]]]
) -> dict[str, Any]:
    """The log-loss of each set of features in each text, as plain JSON values."""
    losses = {}
    for name, more in SETS.items():
        weights: dict[str, Floats] = {}
        for _ in range(TIMES):
            for other, learnt in before:
                losses_of(other, learnt, more, weights)
        losses[name] = losses_of(trace, places, more, weights)
    return {"guesses": sum(len(place.draws) for place in places), "losses": losses}


def losses_of(
    trace: Trace, places: Sequence[Place], more: Sequence[str], weights: dict[str, Floats]
) -> list[float]:
    """The log-loss of all guesses of each text, added up, by weights that learn on: they are mutated."""
    losses = dict.fromkeys((place.request for place in places), 0.0)
    for place, inputs in inputs_of(trace, places, more):
        of_draws = [weights_of(weights, draw, inputs.shape[1]) for draw in place.draws]
        rates = [likely(values @ own) for values, own in zip(inputs, of_draws, strict=True)]
        for draw, values, own, rate in zip(place.draws, inputs, of_draws, rates, strict=True):
            right = draw.node == place.accepted
            losses[place.request] -= math.log(rate if right else 1 - rate)
            own += PACE * (right - rate) * values
            np.clip(own, -HEAVIEST, HEAVIEST, out=own)
    return [*losses.values()]


def weights_of(weights: dict[str, Floats], draw: Draw, size: int) -> Floats:
    """Those of a draw's speculator, which begin as the engine's do and with 0 for more features."""
    if draw.speculator not in weights:
        shipped = prior(len(draw.evidence))
        weights[draw.speculator] = np.array([*shipped, *[0.0] * (size - len(shipped))])
    return weights[draw.speculator]


def likely(sum_of_features: float) -> float:
    """The probability that a logistic says, as the engine bounds it."""
    return min(1 - UNSURE, max(UNSURE, 1 / (1 + math.exp(-sum_of_features))))


def inputs_of(trace: Trace, places: Sequence[Place], more: Sequence[str]) -> Iterator[tuple[Place, Floats]]:
    """Each place with the features of its draws, [draws, features], as they were known then."""
    rates = Rates()
    for place in places:
        own = features_of(place.draws, place.temperature)
        ranks: dict[str, int] = {}
        values = []
        for draw, features in zip(place.draws, own, strict=True):
            rank = ranks[draw.speculator] = ranks.get(draw.speculator, -1) + 1
            found = {
                "depth": min(place.depth, DEEPEST) / DEEPEST,
                "rank": min(1.0, max(0, rank - 1) / 2),
                "length": matched(draw) / LONGEST,
                "root": unsure_of_root(trace, place),
                "own": rates.beside_all(draw.speculator, place.request),
            }
            values.append([*features, *[found[name] for name in more]])
        yield place, np.array(values)
        rates.learn(place)


def matched(draw: Draw) -> float:
    """The tokens that a lookup has matched; 0 of others."""
    return 0.0 if len(draw.evidence) not in (1, 3) else max(0.0, min(float(LONGEST), draw.evidence[0]))


def unsure_of_root(trace: Trace, place: Place) -> float:
    """What the target left to other tokens than the likeliest where it chose the root; 0: not known."""
    number = int(place.request)
    output = place.end - 1 - len(trace.texts[number].prompt)
    best = trace.likeliest[trace.starts[number] + output, 0] if output >= 0 else math.nan
    return 0.0 if math.isnan(best) else 1 - math.exp(best)


def log_odds(rate: float) -> float:
    return math.log(rate / (1 - rate))


def page(cells: Mapping[str, Any], first: Trace) -> list[str]:
    """Markdown: the log-loss of the features that there are, and what each other one takes off it."""
    drafts = ", ".join(draft.model for draft in first.drafts.values()) or "no draft"
    names = [name for name in SETS if name != "now"]
    return [
        f"# Other features of guesses: {first.model} with {drafts}",
        "",
        f"Log-loss with the {len(NAMES)} features that there are, and by how much less it is with one more, "
        "as a ratio with its 95% interval over texts, which are paired: above 1 the feature tells something. "
        f"Of each trace all the others here were learnt from before, {TIMES} times.",
        "",
        row("trace", "guesses", "log-loss", *names),
        row(*["---"] * (len(names) + 3)),
        *(row_of(name, cell) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    losses = cell["losses"]
    others = [str(speedup(losses["now"], losses[other])) for other in SETS if other != "now"]
    return row(name, cell["guesses"], f"{sum(losses['now']) / cell['guesses']:.4f}", *others)


if __name__ == "__main__":
    run(main)
