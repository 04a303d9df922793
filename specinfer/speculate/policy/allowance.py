"""The seconds that speculation may lose.

A step with guesses takes so many seconds more than one without, and saves the seconds of the plain steps
whose tokens it has made; the allowance grows or shrinks by the difference, and by 1.5% of the step's own
time. Where it is used up nobody guesses; then it grows by 1% of the time, and that pays for trying again.

    the bound   In any steps, of S seconds, speculation has lost at most 1.5% of S and 64 plain steps.

    the proof   The allowance A begins at 32 plain steps and is cut to that in every step. A step with guesses
                is run only while A > 0, and adds at most 1.5% of its time less its loss; one without adds at
                most 1% of its time. Nothing else adds to A. A step counts for at most 32 plain steps, so A is
                never below -32 of them; the time spent on reading texts is spread over 64 steps, is charged
                at once when speculation is switched off, and has to be earned back before anybody guesses.

The more requests a step has, the surer is its result: the luck of their guesses evens out with the root of
their number. So the 32 are divided by that root.

The allowance is the most that speculation can lose. It usually loses less: every 64 steps with guesses it is
asked whether they were slower than plain ones by more than 1.5%, with 95% confidence. Then, too, nobody
guesses, for 64 steps at first, and twice as many each time, up to 4096; sooner where a request is new or the
batch has another size, if the allowance has the seconds. A trial may lose 4 plain steps of it.

Where plain steps take seconds and are known (guard.py), the tolerance is smaller: the allowance begins at 2
plain steps and holds at most 8 of what guesses have won, and a step counts for at most 8. So from the start
the loss is at most 1.5% of S and 10 plain steps, and in any steps 16 of them. To give a draft's memory to
layers of its target is charged to the allowance, too, so it may lose that time once more.
"""

from __future__ import annotations

import logging
import math
from typing import Final, NamedTuple

_LOG = logging.getLogger(__name__)

WINDOW: Final = 64  # steps
LONGEST_PAUSE: Final = 4096  # steps
LOSS: Final = 0.015  # of the time of steps with guesses
TRIALS: Final = 0.01  # of the time of steps without
_SURE: Final = 1.645  # standard errors; 95% of values without a loss lie above


class Tolerance(NamedTuple):
    """The losses that speculation may make, in plain steps, and how long it is off behind them."""

    # Of one request; of more, divided by the root of their number.
    first: float  # that the allowance begins with
    credit: float  # the most that it holds
    most: float  # that a step counts for
    trial: float  # that a trial may lose
    enough: float  # for a trial; one with less would end at its first miss
    pause: int  # steps, of the first pause


USUAL: Final = Tolerance(first=32.0, credit=32.0, most=32.0, trial=4.0, enough=0.5, pause=WINDOW)
KNOWN: Final = Tolerance(first=2.0, credit=8.0, most=8.0, trial=0.5, enough=0.25, pause=16)


class Allowance:
    """The seconds that speculation may lose, and whether anybody may guess."""

    def __init__(self, tolerance: Tolerance = USUAL) -> None:
        self._tolerance = tolerance
        self.seconds = math.inf  # cut when the first step begins
        self.guessing = True  # whether speculation is on
        self._floor = 0.0  # of the seconds, below which speculation is switched off
        self._pause = tolerance.pause  # the next one, in steps
        self._left = 0  # steps of this pause
        self._trial = False
        self._size = 0  # of the batch, in powers of two
        self._plain = 0.0  # seconds of a plain step
        self._reading = 0.0  # seconds spent on reading texts that are not charged yet
        self._window: list[float] = []  # of each step with guesses, how much it won beyond the loss allowed
        self._won = 0.0  # of these, in plain steps

    def allows(self, requests: int, plain: float, *, new: bool) -> bool:
        """Whether anybody may guess in a step that begins.

        Args:
            requests: in the batch.
            plain: seconds of a step of these requests without guesses.
            new: one of them was not there before.
        """
        self._plain = plain
        tolerance = self._tolerance
        most = tolerance.credit if math.isfinite(self.seconds) else tolerance.first
        self.seconds = min(self.seconds, most * plain / math.sqrt(max(1, requests)))
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

    def held(self, seconds: float) -> None:
        """Count a step in which nobody could guess, and that took so long."""
        self._left -= 1
        self.seconds += TRIALS * min(seconds, self._tolerance.most * self._plain)

    def charge(self, seconds: float) -> None:
        """Count seconds that went into an end of guessing."""
        self.seconds -= seconds

    def guessed(self, seconds: float, plain: float, spent: float, saved: float, read: float = 0.0) -> None:
        """Count a step in which somebody could guess.

        Args:
            seconds: it took.
            plain: one without guesses would have taken, without the prompts of this one.
            spent: on guesses, of `seconds`.
            saved: by them, of later steps.
            read: spent besides on reading texts, for which no guess of this step can pay.
        """
        self._reading += read
        part = self._reading / WINDOW
        self._reading -= part
        most = self._tolerance.most * plain
        lost = min(spent, most) + part
        self.seconds += saved - lost + LOSS * min(seconds, most)
        won = (saved - lost) / plain
        self._won += won
        self._window.append(won + LOSS * (1 + lost / plain))  # above zero: faster than 98.5% of plain
        if self.seconds <= self._floor:
            self._stop()
        elif len(self._window) == WINDOW:
            self._judge()

    def _judge(self) -> None:
        """Switch speculation off where the window was slower than plain steps."""
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
