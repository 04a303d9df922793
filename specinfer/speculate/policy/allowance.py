"""Allowance: the seconds that speculation may lose.

A *plain* step has no guesses. A step with guesses takes longer than a plain one, and saves the seconds of the
plain steps whose tokens it has made. The allowance changes by the difference, and grows by 1.5% of the step's
time. When it is used up, speculation is off; it then grows by 1% of the time, which pays for a trial.

    bound   Over any steps that take S seconds, speculation loses at most 1.5% of S and 64 plain steps.
    proof   The allowance A starts at 32 plain steps and is limited to 32 in every step. A step with guesses
            runs only while A > 0, and adds at most 1.5% of its time less its loss; a plain step adds at most
            1% of its time. Nothing else adds to A. A step counts for at most 32 plain steps, so A is never
            below -32 of them. The time of reading texts is spread over 64 steps; it is charged at once when
            speculation is switched off, and must be earned back before speculation is on again.

With more requests in a step its result has less variance: the standard deviation falls with the root of their
number. So the 32 are divided by that root.

The allowance is the maximum loss. The usual loss is smaller: every 64 steps with guesses, a test checks with
95% confidence whether they were slower than plain ones by more than 1.5%. If so, speculation is off for 64
steps at first, and for twice as many each time, up to 4096. It is on sooner for a new request or another
batch size, if the allowance suffices. A trial may lose 4 plain steps.

If plain steps take seconds and their cost is known (guard.py), the tolerance is smaller: the allowance starts
at 2 plain steps and holds at most 8, and a step counts for at most 8. So from the start the loss is at most
1.5% of S and 10 plain steps, and over any steps 16 of them. Giving a draft's memory to layers of its target
is charged, too, once.
"""

from __future__ import annotations

import logging
import math
from typing import Final, NamedTuple

_LOG = logging.getLogger(__name__)

WINDOW: Final = 64  # steps
LONGEST_PAUSE: Final = 4096  # steps
LOSS: Final = 0.015  # tolerated loss, as a part of the time of steps with guesses
TRIALS: Final = 0.01  # part of the time of plain steps that trials may take
_SURE: Final = 1.645  # standard errors of the one-sided 95% test


class Tolerance(NamedTuple):
    """Limits of losses, in plain steps, and the length of the first pause."""

    # For one request; for more, divided by the root of their number.
    first: float  # initial allowance
    credit: float  # maximum allowance
    max_step: float  # maximum that one step counts for
    trial: float  # maximum loss of a trial
    enough: float  # allowance needed for a trial; with less it would end at its first miss
    pause: int  # steps of the first pause


DEFAULT_TOLERANCE: Final = Tolerance(
    first=32.0, credit=32.0, max_step=32.0, trial=4.0, enough=0.5, pause=WINDOW
)
KNOWN_COST_TOLERANCE: Final = Tolerance(first=2.0, credit=8.0, max_step=8.0, trial=0.5, enough=0.25, pause=16)


class Allowance:
    """The seconds that speculation may still lose, and whether it is on."""

    def __init__(self, tolerance: Tolerance = DEFAULT_TOLERANCE) -> None:
        self._tolerance = tolerance
        self.seconds = math.inf  # limited when the first step begins
        self.guessing = True  # True if speculation is on
        self._floor = 0.0  # speculation is switched off below these seconds
        self._pause = tolerance.pause  # length of the next pause, in steps
        self._left = 0  # remaining steps of this pause
        self._trial = False
        self._size = 0  # batch size, rounded to a power of two
        self._plain = 0.0  # seconds of a plain step
        self._reading = 0.0  # seconds of reading texts that are not charged yet
        self._window: list[float] = []  # gain beyond the tolerated loss of each step with guesses
        self._won = 0.0  # gain of the window, in plain steps

    def allows(self, requests: int, plain: float, *, new: bool) -> bool:
        """Start a step; returns whether speculation is on for it.

        Args:
            requests: number of requests in the batch.
            plain: seconds of a plain step of these requests.
            new: True if one of them was not in the step before.
        """
        self._plain = plain
        tolerance = self._tolerance
        limit = tolerance.credit if math.isfinite(self.seconds) else tolerance.first
        self.seconds = min(self.seconds, limit * plain / math.sqrt(max(1, requests)))
        size, before = requests.bit_length(), self._size
        self._size = size
        if not self.guessing:
            if new:
                self._left = 0
            elif size != before:
                self._left = min(self._left, tolerance.pause)
            if self._left <= 0 and self.seconds >= tolerance.enough * plain:
                self.guessing = self._trial = True
                self._floor = max(0.0, self.seconds - tolerance.trial * plain)
                self._window, self._won = [], 0.0
        return self.guessing

    def count_plain(self, seconds: float) -> None:
        """Count a step of `seconds` in which speculation was off."""
        self._left -= 1
        self.seconds += TRIALS * min(seconds, self._tolerance.max_step * self._plain)

    def charge(self, seconds: float) -> None:
        """Subtract seconds that giving a draft's memory away has cost."""
        self.seconds -= seconds

    def count_guessing(
        self, seconds: float, plain: float, spent: float, saved: float, read: float = 0.0
    ) -> None:
        """Count a step in which speculation was on.

        Args:
            seconds: time of the step.
            plain: time of a plain step without this step's prompts.
            spent: part of `seconds` spent on guesses.
            saved: time of later steps that the guesses save.
            read: further time spent on reading texts, which the guesses of one step cannot pay for.
        """
        self._reading += read
        part = self._reading / WINDOW
        self._reading -= part
        max_seconds = self._tolerance.max_step * plain
        lost = min(spent, max_seconds) + part
        self.seconds += saved - lost + LOSS * min(seconds, max_seconds)
        won = (saved - lost) / plain
        self._won += won
        self._window.append(won + LOSS * (1 + lost / plain))  # above 0: within the tolerance
        if self.seconds <= self._floor:
            self._stop()
        elif len(self._window) == WINDOW:
            self._judge()

    def _judge(self) -> None:
        """Switch speculation off if the window was slower than plain steps."""
        steps = len(self._window)
        mean = sum(self._window) / steps
        variance = max(0.0, sum([margin * margin for margin in self._window]) / steps - mean * mean)
        if mean + _SURE * math.sqrt(variance / steps) < 0 or (self._trial and self._won < 0):
            self._stop()
            return
        if self._won >= 0:
            self._trial = False
            self._floor = 0.0
            self._pause = self._tolerance.pause
        self._window, self._won = [], 0.0

    def _stop(self) -> None:
        if not self._trial:
            _LOG.info(
                "speculation is off for %d steps, then tried again for 1%% of the time: it made the last %d "
                "steps slower, by the time of %.1f steps",
                self._pause,
                len(self._window),
                -self._won,
            )
        self.guessing = self._trial = False
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self.seconds -= self._reading
        self._reading = 0.0
