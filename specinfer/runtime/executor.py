"""The executor: whoever computes for an engine.

The engine knows only the protocol. It never asks where a tensor lies, how many processes share a model, or
whether a pass has finished when `launch` returns: the flight is asked for answers, and waits where it must.
docs/map.md says what an implementation owes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from specinfer.models.language_model import LanguageModel
from specinfer.plan import StepPlan
from specinfer.progress import Progress
from specinfer.runtime.batch import likelihoods, step_rows
from specinfer.runtime.cost_curve import CostCurve, Timed, cost_curve
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.tree import TokenTree


class Executor(Protocol):
    """Runs the target's passes over cache slots that the scheduler gives out, for one thread at a time."""

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Flight:
        """Start the target's pass over the plan's texts and their trees, one for each of `plan.tree_entries`.

        It writes K and V of the rows that `runtime.batch.step_rows` names, and the flight's rows with logits
        are numbered as `logit_rows` says. `taps` are layers whose inputs the flight keeps.
        """
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Make accepted nodes part of their texts, behind every pass launched before and before the next."""
        ...


class LocalExecutor:
    """The Executor of one process: models, their caches and what their passes cost, on one device."""

    def __init__(self, target: LanguageModel, *, num_blocks: int, block_size: int) -> None:
        """Make the target's cache; every draft's has as many blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.target = self.runner(target)

    @property
    def positions(self) -> int:
        """Cache positions, of each model."""
        return self.num_blocks * self.block_size

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Flight:
        """As Executor says; the pass has ended when this returns."""
        return self.target.launch(
            step_rows(plan, trees), likelihoods=partial(likelihoods, plan, trees), taps=taps
        )

    def move(self, moves: Sequence[Move]) -> None:
        """As Executor says."""
        self.target.move(moves)

    def runner(self, model: LanguageModel) -> ModelRunner:
        """A model over a cache of its own, whose blocks are the target's."""
        return ModelRunner(model, num_blocks=self.num_blocks, block_size=self.block_size)

    def curve(
        self,
        variant: str,
        *,
        max_rows: int,
        keep: bool,
        draft: Timed | None = None,
        behind_target: bool = False,
        progress: Progress | None = None,
    ) -> CostCurve:
        """What the target's passes cost, or a draft's: measured now, or read (runtime/cost_curve.py).

        Writes into the caches' first slots, which nobody may use yet.

        Args:
            variant: part of the key under which it is kept: quantization and the kind of output layer.
            max_rows: rows of the largest pass, where caches and contexts have room for so many.
            keep: whether the next process reads this curve however quickly it was measured.
            draft: who is measured in place of the target; a draft's pass makes the logits of all its rows.
            behind_target: whether each of its passes follows one of the target's, as in a step.
            progress: shows a bar.
        """
        runner: Timed = self.target if draft is None else draft
        return cost_curve(
            runner,
            max_rows=min(max_rows, self.positions, runner.model.config.max_context),
            variant=variant,
            every_row=draft is not None,
            keep=keep,
            behind=self.target if behind_target else None,
            progress=progress,
        )
