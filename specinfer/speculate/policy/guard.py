"""Switches speculation off where it loses, and tries it again for a hundredth of the time.

The one idea: speculation has an allowance of seconds it may lose. A step with guesses takes so many seconds
more than one without, and saves the seconds of the plain steps whose tokens it has made; the allowance grows
or shrinks by the difference, and by 1.5% of the step's own time. Where it is used up nobody guesses; then it
grows by 1% of the time, and that pays for trying again.

    the bound   In any steps, of S seconds, speculation has lost at most 1.5% of S and 64 plain steps.

    the proof   The allowance A begins at 32 plain steps or less and is cut to that in every step. A step with
                guesses is run only while A > 0, and adds at most 1.5% of its time less what it lost; one
                without adds at most 1% of its time. Nothing else adds to A. So all that was lost comes to at
                most 32 plain steps + 1.5% of S - A. A step counts for at most 32 plain steps, so A is never
                below -32 of them; what was spent on reading texts is spread over 64 steps and stands to A's
                debit at once when speculation is switched off, whatever it is, and has to be earned back
                before anybody guesses again.

The more requests a step has, the surer is what it shows: what their guesses win by chance evens out with the
root of their number. So the allowance begins at 32 plain steps of one request, 16 of four and 5.7 of 32.

That is true of the seconds it is told. It is told what steps take, and what plain ones of now would: an error
there is one in the bound. A step of more than 33 plain ones is taken for a pause of the machine.

The allowance is what speculation cannot lose more than. It usually loses less: every 64 steps with guesses it
is asked whether they were slower than plain ones by more than 1.5%, with 95% confidence. Then, too, nobody
guesses, for 64 steps at first, and twice as many each time, up to 4096; sooner where a request is new or the
batch has another size, if the allowance has the seconds. A trial may lose 4 plain steps of it.
"""

from __future__ import annotations

import logging
import math
from typing import Final

_LOG = logging.getLogger(__name__)

WINDOW: Final = 64  # steps
LONGEST_PAUSE: Final = 4096  # steps
LOSS: Final = 0.015  # of the time of steps with guesses
TRIALS: Final = 0.01  # of the time of steps without
CREDIT: Final = 32.0  # plain steps of one request; of more, divided by the root of their number
_SURE: Final = 1.645  # standard errors; 95% of what is no loss lies above
_TRIAL: Final = 4.0  # plain steps that a trial may lose
_ENOUGH: Final = 0.5  # plain steps; a trial with less would end at its first miss


class Guard:
    """Says of each step whether anybody may guess, and is told what came of it."""

    def __init__(self) -> None:
        self._allowance = math.inf  # seconds; cut to the credit when the first step begins
        self._plain = 0.0  # seconds of a plain step, as it is thought to be now
        self._floor = 0.0  # of the allowance, below which speculation is switched off
        self._pause = WINDOW  # the next one, in steps
        self._left = 0  # steps of this pause
        self._guessing = True
        self._trial = False
        self._size = 0  # of the batch, in powers of two
        self._reading = 0.0  # seconds spent on reading texts that are not charged yet
        self._steps = 0  # with guesses, of this window
        self._sum = self._squares = self._won = 0.0  # of these, in plain steps

    @property
    def guessing(self) -> bool:
        """Whether speculation is on."""
        return self._guessing

    @property
    def allowance(self) -> float:
        """The seconds that speculation may lose from now on."""
        return self._allowance

    def allows(self, requests: int, plain: float, *, new: bool) -> bool:
        """Whether anybody may guess in a step that begins.

        Args:
            requests: in the batch.
            plain: seconds of a step of these requests in which nobody guesses.
            new: one of them was not there before.
        """
        self._plain = plain
        self._allowance = min(self._allowance, CREDIT * plain / math.sqrt(max(1, requests)))
        size, before = requests.bit_length(), self._size
        self._size = size
        if not self._guessing:
            if new:
                self._left = 0
            elif size != before:
                self._left = min(self._left, WINDOW)
            if self._left <= 0 and self._allowance >= _ENOUGH * plain:
                self._guessing = self._trial = True
                self._floor = max(0.0, self._allowance - _TRIAL * plain)
                self._open_window()
        return self._guessing

    def guessed(self, seconds: float, plain: float, spent: float, saved: float, read: float = 0.0) -> None:
        """Count a step in which somebody could guess.

        Args:
            seconds: it took, or 0 where the clock was no use.
            plain: one without guesses would have taken, without the prompts of this one.
            spent: on guesses, of `seconds`.
            saved: by them, of later steps.
            read: spent besides on reading texts, for which no guess of this step can pay.
        """
        self._reading += read
        part = self._reading / WINDOW
        self._reading -= part
        lost = min(spent, CREDIT * plain) + part
        self._allowance += saved - lost + LOSS * min(seconds, CREDIT * plain)
        won = (saved - lost) / plain
        margin = won + LOSS * (1 + lost / plain)  # above zero: faster than 98.5% of plain
        self._steps += 1
        self._won += won
        self._sum += margin
        self._squares += margin * margin
        if self._allowance <= self._floor:
            self._stop()
        elif self._steps == WINDOW:
            self._judge()

    def held(self, seconds: float) -> None:
        """Count a step in which nobody could guess, and that took so long; 0 where the clock was no use."""
        self._left -= 1
        self._allowance += TRIALS * min(seconds, CREDIT * self._plain)

    def _judge(self) -> None:
        mean = self._sum / self._steps
        variance = max(0.0, self._squares / self._steps - mean * mean)
        if mean + _SURE * math.sqrt(variance / self._steps) < 0 or (self._trial and self._won < 0):
            self._stop()
            return
        if self._won >= 0:
            self._trial = False
            self._floor = 0.0
            self._pause = WINDOW
        self._open_window()

    def _stop(self) -> None:
        if not self._trial:
            _LOG.info(
                "speculation is off for %d steps, then tried again for 1%% of the time: it made the last %d "
                "steps slower, by the time of %.1f steps",
                self._pause,
                self._steps,
                -self._won,
            )
        self._guessing = self._trial = False
        self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._allowance -= self._reading
        self._reading = 0.0

    def _open_window(self) -> None:
        self._steps = 0
        self._sum = self._squares = self._won = 0.0
