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

If plain steps take seconds and their cost is known (guard.py), the tolerance is 5 plain steps in place of 32:
the loss is at most 1.5% of S and 10 plain steps. Giving a draft's memory to layers of its target is charged,
too, once.
"""

import logging
import math
from typing import Final

import numpy as np

_LOG = logging.getLogger(__name__)

WINDOW: Final = 64  # steps
LONGEST_PAUSE: Final = 4096  # steps
LOSS: Final = 0.015  # tolerated loss, as a part of the time of steps with guesses
TRIALS: Final = 0.01  # part of the time of plain steps that trials may take
_SURE: Final = 1.645  # standard errors of the one-sided 95% test


DEFAULT_TOLERANCE: Final = 32.0  # plain steps
KNOWN_COST_TOLERANCE: Final = 5.0
_TRIAL: Final = 8  # a trial may lose this part of the tolerance
_ENOUGH: Final = 64  # and needs an allowance of this part, as with less it would end at its first miss
_PAUSE: Final = 2  # steps of the first pause, for each plain step of the tolerance


class Allowance:
    """The seconds that speculation may still lose, and whether it is on."""

    def __init__(self, tolerance: float = DEFAULT_TOLERANCE) -> None:
        """Make an allowance of at most `tolerance` plain steps, divided by the root of the requests.

        A step counts for at most as many.
        """
        self._tolerance = tolerance
        self.seconds = math.inf  # limited when the first step begins
        self.guessing = True  # True if speculation is on
        self._floor = 0.0  # speculation is switched off below these seconds
        self._pause = self._first_pause = round(_PAUSE * tolerance)  # length of the next pause, in steps
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
        self.seconds = min(self.seconds, self._tolerance * plain / math.sqrt(max(1, requests)))
        before, self._size = self._size, requests.bit_length()
        if not self.guessing:
            if new:
                self._left = 0
            elif self._size != before:
                self._left = min(self._left, self._first_pause)
            if self._left <= 0 and self.seconds >= self._tolerance / _ENOUGH * plain:
                self.guessing = self._trial = True
                self._floor = max(0.0, self.seconds - self._tolerance / _TRIAL * plain)
                self._window, self._won = [], 0.0
        return self.guessing

    def count_plain(self, seconds: float) -> None:
        """Count a step of `seconds` in which speculation was off."""
        self._left -= 1
        self.seconds += TRIALS * min(seconds, self._tolerance * self._plain)

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
        max_seconds = self._tolerance * plain
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
        error = np.std(self._window) / math.sqrt(WINDOW)
        if np.mean(self._window) + _SURE * error < 0 or (self._trial and self._won < 0):
            self._stop()
        elif self._won >= 0:
            self._trial = False
            self._floor = 0.0
            self._pause = self._first_pause
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
