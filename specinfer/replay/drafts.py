"""Draft models whose passes are recorded, and draft models that answer from such records.

Both are the engine's own DraftModel: only the pass of the model and the draws from its logits are replaced.
So what a draft has read, how its trees grow and what it keeps is decided by the code that does in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specinfer.errors import IntegrityError
from specinfer.replay.guess_trie import NO_SITE, GuessRecorder, GuessTrie
from specinfer.replay.trace import RecordedDraft
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children


@dataclass(slots=True)
class RecordedPasses:
    """A draft's passes that take down what they draw, and how long passes of so many rows take."""

    runner: ModelRunner
    name: str
    vocabulary: DraftVocabulary | None
    notes: GuessRecorder
    measured: dict[int, tuple[int, float]]  # rows -> passes of so many, their seconds
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Run the rows, draw, and note the children of each site."""
        before = [len(site.builder.draws) for site in sites]
        began = self.clock()
        draw_children(self.runner.launch(rows), sites, self.name, self.vocabulary)
        seconds = self.clock() - began
        count = num_rows(rows)
        passes, spent = self.measured.get(count, (0, 0.0))
        self.measured[count] = passes + 1, spent + seconds
        # Sites of one tree follow each other: the draws of one end where those of the next begin.
        for number, site in enumerate(sites):
            builder = site.builder
            draws = [draw for draw in builder.draws[before[number] :] if draw.parent == site.node]
            tokens = [builder.token_ids[draw.node] for draw in draws]
            self.notes.note(builder.path_tokens(site.node), site.width, tokens, draws)


class CostTable:
    """Seconds of passes by rows, looked up: a curve is asked once for each number of rows."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._seconds = curve.seconds(range(1024)).tolist()

    def seconds(self, rows: int) -> float:
        """Seconds of one pass of so many rows."""
        if rows >= len(self._seconds):
            self._seconds = self._curve.seconds(range(2 * rows)).tolist()
        return float(self._seconds[rows])


@dataclass(slots=True)
class Replayed:
    """A draft that is answered from a record: where, and what its passes would have cost.

    What a record lacks is remembered in `lacks`, and drawn as nothing: the ensemble catches what a speculator
    raises, so whoever plays the trace has to ask.
    """

    name: str
    costs: CostTable
    seconds: float = 0.0  # of all passes so far
    passes: int = 0
    lacks: str = ""
    _places: dict[str, tuple[GuessTrie, int]] = field(
        default_factory=dict
    )  # request -> guesses, place of end 0

    def follow(self, request_id: str, draft: RecordedDraft, place: int) -> None:
        """Answer for a request from now on; its text of `end` tokens has the root at `place + end`."""
        self._places[request_id] = draft.guesses, place

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._places.pop(request_id, None)

    def begin_step(self) -> None:
        """A step begins."""

    def spend(self, rows: int) -> None:
        """A pass of so many rows."""
        self.seconds += self.costs.seconds(rows)
        self.passes += 1

    def root(self, site: Site) -> tuple[GuessTrie, int]:
        """The guesses below the root of a tree that is about to grow, and its site or NO_SITE."""
        guesses, place = self._places[site.request_id]
        return guesses, int(guesses.roots[place + site.position])


@dataclass(slots=True)
class ReplayedPasses(Replayed):
    """A draft model's passes that are answered from a record."""

    _sites: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # of the step: id of builder -> node -> site

    def begin_step(self) -> None:
        """Forget the trees of the step before."""
        self._sites.clear()

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Add what was drawn for each site when it was recorded, as many children as are wanted now."""
        self.spend(num_rows(rows))
        for site in sites:
            builder = site.builder
            if site.node == 0:
                guesses, at = self.root(site)
                known = self._sites[id(builder)] = {0: at}
            else:
                guesses, _ = self._places[site.request_id]
                known = self._sites[id(builder)]
                at = known[site.node]
            if at == NO_SITE or guesses.asked[at] < site.width:
                self.lacks = self.lacks or _what_lacks(self.name, site, at)
                continue
            tokens, confidences, below = guesses.draws(at)
            seen, rule, node, width = guesses.seen(at), site.draws_by, site.node, site.width
            for i in range(min(width, len(tokens))):
                if not site.keeps(i, confidences[i]):
                    continue
                child = builder.add(node, tokens[i], self.name, rule, None, confidences[i], seen)
                if child is not None:
                    known[child] = below[i]


class NoModel(ModelRunner):
    """A draft's runner where no model is: its K and V are nowhere, and passes are answered by others."""

    def __init__(self, block_size: int, max_context: int) -> None:
        self.block_size = block_size
        self._context = max_context

    @property
    def max_context(self) -> int:
        """Tokens of the longest text the model could read."""
        return self._context

    def launch(self, rows: Sequence[Rows], **_: object) -> Flight:
        """Never called: passes are answered from a record."""
        raise IntegrityError("a replayed draft has no model to run")

    def move(self, moves: Sequence[Move]) -> None:
        """There is nothing to move."""


def num_rows(rows: Sequence[Rows]) -> int:
    """The rows of one pass."""
    return sum(len(part.token_ids) for part in rows)


def _what_lacks(name: str, site: Site, at: int) -> str:
    depth = len(site.builder.path_tokens(site.node))
    what = f"as deep as {depth + 1}" if at == NO_SITE else f"of {site.width} children at depth {depth}"
    return (
        f"{name} was not recorded {what} below {site.position - depth} tokens of request {site.request_id}; "
        "record the trace with a deeper or wider --expansion, or replay a smaller tree"
    )
