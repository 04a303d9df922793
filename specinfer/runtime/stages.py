"""A pass through pipeline stages, whose rows may go in parts, one behind another.

    stage 0    part 1   part 2   part 3                     logits
    stage 1             part 1   part 2   part 3
    stage 2                      part 1   part 2   part 3

Rows of a pass need K and V of the rows before them, and those of the same layer alone. So a stage may begin
with the first of them while the stage before has the others in hand, and the bits are the same. Each part
reads the stage's weights once more. That is worth its time where rows take longer than weights do: for
prompts, and for wide trees, where arithmetic binds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.models.language_model import LanguageModel, Read
from specinfer.parallel.group import Group
from specinfer.runtime.batch import Rows

_FEW: Final = 4  # rows that take hardly longer than one
_MANY: Final = 32  # rows of which it can be told how long each takes
_LEAST: Final = 16  # rows of a part
_SLOWER: Final = 10  # times that another stage's layer may take as long, beside the limit of an exchange


class StagePart(NamedTuple):
    """Some rows of a pass, and how this rank's layers are run on what they are given; None: token ids."""

    rows: Sequence[Rows]
    num_rows: int
    num_chosen: int  # of them, which are read behind the last layer
    read: Callable[[Tensor | None], Read]


class StagedPasses:
    """This rank's part of passes over one cache: between what its stage is given and what it hands on."""

    def __init__(self, group: Group, model: LanguageModel) -> None:
        self.group = group
        self.model = model
        stage = model.config.stage
        self.stages = 1 if stage.begins and stage.ends else group.stages  # that run the model
        self._reads: list[Read] = []  # of the parts of a pass that is not over
        self._chosen = 0  # of all of its rows
        self._seconds = 0.0  # that its parts took here
        self.patience = 0.0  # seconds by which other stages may be behind with the last pass, at rank 0
        self._pace = Pace()

    def cut(self, rows: Sequence[Rows]) -> list[Sequence[Rows]]:
        """The rows of a pass in as many parts as are quickest."""
        count = sum(len(one.token_ids) for one in rows)
        return cut_rows(rows, self._pace.parts(count, self.stages))

    def run(self, part: StagePart, *, more: bool = False) -> Read:
        """Run a part of a pass; behind the last one (not `more`), what all of them leave here.

        The first stage waits then for the rows that are read behind the last layer.
        """
        stage = self.model.config.stage
        if self.stages == 1:
            return part.read(None)
        given = None if stage.begins else self._taken(part.num_rows)
        began = time.perf_counter()
        found = part.read(given)
        seconds = time.perf_counter() - began
        self._pace.note(part.num_rows, seconds)
        self._seconds += seconds
        self._chosen += part.num_chosen
        self._reads.append(found)
        if found.handed_TD is not None:
            self._hand_on(found.handed_TD)
        if more:
            return found
        # Not before: who waits for room to say something hears nothing, and all would wait for one another.
        hidden_RD = _stacked([read.hidden_RD for read in self._reads])
        tapped_TND = _stacked([read.tapped_TND for read in self._reads if read.tapped_TND is not None])
        assert hidden_RD is not None, "a pass has a part"
        if stage.ends:
            self._hand_on(hidden_RD)
        if stage.begins:
            hidden_RD = self._taken(self._chosen)
        self.patience = self._patience or 0.0
        self._reads, self._chosen, self._seconds = [], 0, 0.0
        return Read(hidden_RD, tapped_TND)

    def _taken(self, rows: int) -> Tensor:
        like = torch.empty(rows, self.model.config.hidden_size, dtype=self.model.dtype)
        return self.group.take(like, self._patience) if rows else like

    def _hand_on(self, rows_TD: Tensor) -> None:
        if len(rows_TD):
            self.group.hand_on(rows_TD, self._patience)

    @property
    def _patience(self) -> float | None:
        """Seconds that other stages may be behind; followers wait for ever, as rank 0 finds who is lost."""
        if self.group.rank:
            return None
        stage = self.model.config.stage
        return _SLOWER * self._seconds * (stage.count / (stage.behind - stage.first) - 1)


class Pace:
    """How long a stage takes, as its passes show: in any case, and more for each row.

    With `a` and `b` of these, n rows take about (parts + stages - 1) (a + b n / parts) through all stages,
    which is least at parts^2 = (stages - 1) b n / a.
    """

    def __init__(self) -> None:
        self._least = math.inf  # the quickest passes count: whatever else runs only adds time
        self._row, self._rows = math.inf, 0  # of the quickest by the row, and how many it had

    def note(self, rows: int, seconds: float) -> None:
        """So many rows took so long."""
        if 0 < rows <= _FEW:
            self._least = min(self._least, seconds)
        elif rows >= _MANY and seconds / rows < self._row:
            self._row, self._rows = seconds / rows, rows

    def parts(self, rows: int, stages: int) -> int:
        """In how many parts so many rows go through the stages quickest; 1 while that is not known."""
        if stages == 1 or not self._rows or self._least == math.inf:
            return 1
        more = max(0.0, self._row - self._least / self._rows)
        best = round(math.sqrt((stages - 1) * more * rows / self._least))
        return max(1, min(best, rows // _LEAST))


def cut_rows(rows: Sequence[Rows], parts: int) -> list[Sequence[Rows]]:
    """Rows of a pass in so many parts, in their order and as even as can be."""
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
    """The first so many of a request's rows, and the others."""
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
