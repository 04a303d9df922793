"""What a draft guessed at every place of some texts, as deep and as wide as it was asked.

A draft's children of a node are a function of the text before it (of seed and position too, where draws are
coupled). So for each root, a place of a text, there is a trie of token paths:

    root     of a text and a place in it: the site of no path
    site     a path below a root whose children were drawn: how many it was asked for, what it saw
    draw     one child of a site, best first: its token, its confidence, and the site below it, if any

All of it lies in a few arrays. A site comes before the sites below it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ensure
from specinfer.tree import Draw

NO_SITE = -1


@dataclass(frozen=True, slots=True, eq=False)
class GuessTrie:
    """One draft's guesses along all texts of a trace."""

    roots: NDArray[np.int32]  # [places]: the site of each output token's root, NO_SITE where none was drawn
    first: NDArray[np.int64]  # [sites + 1]: of each site its first draw
    asked: NDArray[np.int32]  # [sites]: how many children were asked for; fewer draws: there are no more
    evidence: NDArray[np.float64]  # [sites, of a draw]
    tokens: NDArray[np.int32]  # [draws]
    confidences: NDArray[np.float64]  # [draws]
    below: NDArray[np.int32]  # [draws]: the site of the path that ends with this draw, or NO_SITE

    def draws(self, site: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, confidences and sites below of a site's draws, best first."""
        of_site = slice(*self.first[site : site + 2].tolist())
        return self.tokens[of_site].tolist(), self.confidences[of_site].tolist(), self.below[of_site].tolist()

    def seen(self, site: int) -> tuple[float, ...]:
        """The evidence of a site's draws."""
        return tuple(self.evidence[site].tolist())

    def complaint(self, places: int, vocab: int) -> str:
        """Why these arrays are no trie over `places` places and `vocab` tokens; "" where they are one."""
        sites, draws = len(self.asked), len(self.tokens)
        if len(self.roots) != places:
            return "there is not one root for each output token"
        if len(self.first) != sites + 1 or len(self.evidence) != sites or self.evidence.ndim != 2:
            return "arrays of sites differ in length"
        if len(self.confidences) != draws or len(self.below) != draws:
            return "arrays of draws differ in length"
        if self.first[0] != 0 or self.first[-1] != draws or (np.diff(self.first) < 0).any():
            return "sites have no range of draws each"
        if ((self.roots < NO_SITE) | (self.roots >= sites)).any():
            return "a root is no site"
        if ((self.tokens < 0) | (self.tokens >= vocab)).any():
            return f"a guess is no token of {vocab}"
        if not (np.isfinite(self.confidences).all() and np.isfinite(self.evidence).all()):
            return "a confidence or a piece of evidence is no finite number"
        above = np.repeat(np.arange(sites), np.diff(self.first))
        if ((self.below != NO_SITE) & ((self.below <= above) | (self.below >= sites))).any():
            return "a site does not lie behind the one above it"
        return ""


@dataclass(slots=True)
class _Site:
    """The children drawn of one path, by the widest question."""

    asked: int
    tokens: list[int]
    confidences: list[float]
    evidence: tuple[float, ...]


@dataclass(slots=True)
class GuessRecorder:
    """Takes down a draft's guesses root by root; `trie` makes arrays of them.

    Trees of several shapes below one root become one trie: the widest question at each path counts.
    """

    _open: dict[tuple[int, ...], _Site] = field(default_factory=dict)  # of the root that is drawn
    _roots: array[int] = field(default_factory=lambda: array("i"))
    _first: array[int] = field(default_factory=lambda: array("q", [0]))
    _asked: array[int] = field(default_factory=lambda: array("i"))
    _evidence: array[float] = field(default_factory=lambda: array("d"))
    _pieces: int = 0  # of evidence a draw has, as soon as one is known
    _tokens: array[int] = field(default_factory=lambda: array("i"))
    _confidences: array[float] = field(default_factory=lambda: array("d"))
    _below: array[int] = field(default_factory=lambda: array("i"))

    def note(self, path: tuple[int, ...], asked: int, tokens: Sequence[int], draws: Sequence[Draw]) -> None:
        """Take down that these are the children of `path` below the open root, `asked` being wanted.

        Raises IntegrityError where a site's draws differ in evidence, as no draft's do.
        """
        known = self._open.get(path)
        if known is not None and known.asked >= asked:
            return
        evidence = draws[0].evidence if draws else ()
        ensure(all(draw.evidence == evidence for draw in draws), "draws of a node saw the same")
        self._open[path] = _Site(asked, list(tokens), [draw.confidence for draw in draws], evidence)

    def close_root(self) -> None:
        """The next place of the texts is reached: what was noted belongs to the one before."""
        paths = sorted(self._open, key=len)
        number = {path: len(self._asked) + i for i, path in enumerate(paths)}
        self._roots.append(number.get((), NO_SITE))
        for path in paths:
            site = self._open[path]
            if not self._pieces and site.evidence:
                self._pieces = len(site.evidence)
                self._evidence.extend([0.0] * (self._pieces * len(self._asked)))  # nobody saw a thing so far
            # A site without draws saw nothing.
            ensure(len(site.evidence) in (0, self._pieces), "all draws of a draft have as much evidence")
            self._evidence.extend(site.evidence or [0.0] * self._pieces)
            self._asked.append(site.asked)
            self._tokens.extend(site.tokens)
            self._confidences.extend(site.confidences)
            self._below.extend(number.get((*path, token), NO_SITE) for token in site.tokens)
            self._first.append(len(self._tokens))
        self._open.clear()

    def trie(self) -> GuessTrie:
        """Everything noted of the roots that were closed."""
        return GuessTrie(
            roots=np.array(self._roots, dtype=np.int32),
            first=np.array(self._first, dtype=np.int64),
            asked=np.array(self._asked, dtype=np.int32),
            evidence=np.array(self._evidence).reshape(len(self._asked), self._pieces),
            tokens=np.array(self._tokens, dtype=np.int32),
            confidences=np.array(self._confidences),
            below=np.array(self._below, dtype=np.int32),
        )
