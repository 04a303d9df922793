"""StagedPasses: passes through pipeline stages, whose rows may be divided into consecutive parts.

    stage 0    part 1   part 2   part 3                     logits
    stage 1             part 1   part 2   part 3
    stage 2                      part 1   part 2   part 3

Rows of a pass need only the K and V of earlier rows in the same layer. So a stage can start with the first
part while the stage before runs the next one, with identical results. Each part reads the stage's weights
again. That pays if computing rows takes longer than reading weights: for prompts and for wide trees.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.models.language_model import LanguageModel, PassOutput
from specinfer.runtime.batch import Rows
from specinfer.transport.group import Group

_FEW: Final = 4  # rows that take about as long as one
_MANY: Final = 32  # rows that suffice to measure the time per row
_MIN_ROWS: Final = 16  # rows of a part
_SLOWER: Final = 10  # multiple of this stage's time that another may take, beyond the limit of an exchange


class StagePart(NamedTuple):
    """Some rows of a pass, and the function that runs this rank's layers on their input (None: token ids)."""

    rows: Sequence[Rows]
    num_rows: int
    num_chosen: int  # number of rows read after the last layer
    read: Callable[[Tensor | None], PassOutput]


class StagedPasses:
    """This rank's part of passes over one cache, between its stage's input and output."""

    def __init__(self, group: Group, model: LanguageModel) -> None:
        self.group = group
        self.model = model
        stage = model.config.stage
        self.stages = 1 if stage.begins and stage.ends else group.stages  # stages of the model
        self._reads: list[PassOutput] = []  # reads of an unfinished pass's parts
        self._chosen = 0  # rows read after the last layer, in all parts
        self._seconds = 0.0  # time of the pass's parts on this rank
        self.patience = 0.0  # at rank 0, seconds by which other stages may lag behind with the last pass
        self._times = StageTimes()

    def cut(self, rows: Sequence[Rows]) -> list[Sequence[Rows]]:
        """Divide the rows of a pass into the fastest number of parts."""
        count = sum(len(one.token_ids) for one in rows)
        return cut_rows(rows, self._times.parts(count, self.stages))

    def run(self, part: StagePart, *, more: bool = False) -> PassOutput:
        """Run a part of a pass; after the last one (not `more`), return the result of all parts.

        The first stage then waits for the rows that are read after the last layer.
        """
        stage = self.model.config.stage
        if self.stages == 1:
            return part.read(None)
        given = None if stage.begins else self._take(part.num_rows)
        began = time.perf_counter()
        found = part.read(given)
        seconds = time.perf_counter() - began
        self._times.record(part.num_rows, seconds)
        self._seconds += seconds
        self._chosen += part.num_chosen
        self._reads.append(found)
        if found.stage_output_TD is not None:
            self._send_on(found.stage_output_TD)
        if more:
            return found
        # Not before: a rank that waits to send does not receive, and all would wait for one another.
        hidden_RD = _stacked([read.hidden_RD for read in self._reads])
        tapped_TND = _stacked([read.tapped_TND for read in self._reads if read.tapped_TND is not None])
        assert hidden_RD is not None, "a pass has a part"
        if stage.ends:
            self._send_on(hidden_RD)
        if stage.begins:
            hidden_RD = self._take(self._chosen)
        self.patience = self._patience or 0.0
        self._reads, self._chosen, self._seconds = [], 0, 0.0
        return PassOutput(hidden_RD, tapped_TND)

    def _take(self, rows: int) -> Tensor:
        like = torch.empty(rows, self.model.config.hidden_size, dtype=self.model.dtype)
        return self.group.receive_on(like, self._patience) if rows else like

    def _send_on(self, rows_TD: Tensor) -> None:
        if len(rows_TD):
            self.group.send_on(rows_TD, self._patience)

    @property
    def _patience(self) -> float | None:
        """Seconds that other stages may lag behind; None for followers, as rank 0 detects lost ranks."""
        if self.group.rank:
            return None
        stage = self.model.config.stage
        return _SLOWER * self._seconds * (stage.count / (stage.end - stage.first) - 1)


class StageTimes:
    """Measured time of a stage: a constant, and a time per row.

    With a constant `a` and a time per row `b`, n rows take about

        (parts + stages - 1) (a + b n / parts)

    seconds through all stages. The minimum is at parts^2 = (stages - 1) b n / a.
    """

    def __init__(self) -> None:
        self._shortest = math.inf  # the fastest pass, as other load only adds time
        self._row, self._rows = math.inf, 0  # the smallest time per row, and the rows of that pass

    def record(self, rows: int, seconds: float) -> None:
        """Record the seconds of a pass of `rows` rows."""
        if 0 < rows <= _FEW:
            self._shortest = min(self._shortest, seconds)
        elif rows >= _MANY and seconds / rows < self._row:
            self._row, self._rows = seconds / rows, rows

    def parts(self, rows: int, stages: int) -> int:
        """Return the fastest number of parts for `rows` rows; 1 before it is known."""
        if stages == 1 or not self._rows or self._shortest == math.inf:
            return 1
        more = max(0.0, self._row - self._shortest / self._rows)
        best = round(math.sqrt((stages - 1) * more * rows / self._shortest))
        return max(1, min(best, rows // _MIN_ROWS))


def cut_rows(rows: Sequence[Rows], parts: int) -> list[Sequence[Rows]]:
    """Divide the rows of a pass into `parts`, in order and as evenly as possible."""
    total = sum(len(one.token_ids) for one in rows)
    found: list[Sequence[Rows]] = []
    left = list(rows)
    for number in range(1, parts):
        wanted = total * number // parts - total * (number - 1) // parts
        part: list[Rows] = []
        while wanted and left:
            first = left.pop(0)
            if len(first.token_ids) > wanted:
                first, behind = _cut(first, wanted)
                left.insert(0, behind)
            part.append(first)
            wanted -= len(first.token_ids)
        if part:
            found.append(part)
    return [*found, left] if left or not found else found


def _cut(rows: Rows, count: int) -> tuple[Rows, Rows]:
    """Split a request's rows after the first `count`."""
    parents, behind = rows.parents, len(rows.token_ids) - count
    if parents is not None:
        parents = parents[: max(0, len(parents) - behind)] or None
    first = replace(
        rows,
        token_ids=rows.token_ids[:count],
        logits_from=min(rows.logits_from, count),
        parents=parents,
    )
    second = replace(
        rows,
        token_ids=rows.token_ids[count:],
        start=rows.start + count,
        logits_from=max(0, rows.logits_from - count),
    )
    return first, second


def _stacked(parts: Sequence[Tensor]) -> Tensor | None:
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat([*parts])
