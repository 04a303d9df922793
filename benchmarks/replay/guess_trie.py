"""A draft's recorded proposals at every position of some texts, as tries in flat arrays.

A draft's children of a node are a function of the text before it, and of seed and position for coupled draws.
So each root, a position of a text, has a trie of token paths:

    root     a position of a text: the site of the empty path
    site     a path below a root whose children were drawn, with their requested number and evidence
    draw     one child of a site, best first: its token, its confidence, and the site below it, if any

A site precedes the sites below it.
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
    """One draft's proposals along all texts of a trace."""

    roots: NDArray[np.int32]  # [places]: the site of each output token's root, NO_SITE if none was drawn
    first: NDArray[np.int64]  # [sites + 1]: first draw of each site
    asked: NDArray[np.int32]  # [sites]: requested number of children; if fewer were drawn there are no more
    evidence: NDArray[np.float64]  # [sites, evidence per draw]
    tokens: NDArray[np.int32]  # [draws]
    confidences: NDArray[np.float64]  # [draws]
    below: NDArray[np.int32]  # [draws]: site of the path that ends with this draw, or NO_SITE

    def draws(self, site: int) -> tuple[list[int], list[float], list[int]]:
        """Return tokens, confidences and child sites of a site's draws, best first."""
        of_site = slice(*self.first[site : site + 2].tolist())
        return self.tokens[of_site].tolist(), self.confidences[of_site].tolist(), self.below[of_site].tolist()

    def seen(self, site: int) -> tuple[float, ...]:
        """Return the evidence of a site's draws."""
        return tuple(self.evidence[site].tolist())

    def complaint(self, places: int, vocab: int) -> str:
        """Return why these arrays are no trie over `places` positions and `vocab` tokens, or "" for a
        valid trie.
        """
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
    """The children drawn of one path, by its largest requested number."""

    asked: int
    tokens: list[int]
    confidences: list[float]
    evidence: tuple[float, ...]


@dataclass(slots=True)
class GuessRecorder:
    """Records a draft's proposals root by root; `trie` returns their arrays.

    Trees of several shapes below a root become one trie, with the largest requested number at each path.
    """

    _open: dict[tuple[int, ...], _Site] = field(default_factory=dict)  # of the current root
    _roots: array[int] = field(default_factory=lambda: array("i"))
    _first: array[int] = field(default_factory=lambda: array("q", [0]))
    _asked: array[int] = field(default_factory=lambda: array("i"))
    _evidence: array[float] = field(default_factory=lambda: array("d"))
    _pieces: int = 0  # number of evidence values per draw, once known
    _tokens: array[int] = field(default_factory=lambda: array("i"))
    _confidences: array[float] = field(default_factory=lambda: array("d"))
    _below: array[int] = field(default_factory=lambda: array("i"))

    def note(self, path: tuple[int, ...], asked: int, tokens: Sequence[int], draws: Sequence[Draw]) -> None:
        """Record the children of `path` below the current root, of `asked` requested ones.

        Raises IntegrityError if a site's draws differ in evidence, which no draft's do.
        """
        known = self._open.get(path)
        if known is not None and known.asked >= asked:
            return
        evidence = draws[0].evidence if draws else ()
        ensure(all(draw.evidence == evidence for draw in draws), "draws of a node saw the same")
        self._open[path] = _Site(asked, list(tokens), [draw.confidence for draw in draws], evidence)

    def close_root(self) -> None:
        """End the current root and go to the next position of the texts."""
        paths = sorted(self._open, key=len)
        number = {path: len(self._asked) + i for i, path in enumerate(paths)}
        self._roots.append(number.get((), NO_SITE))
        for path in paths:
            site = self._open[path]
            if not self._pieces and site.evidence:
                self._pieces = len(site.evidence)
                self._evidence.extend([0.0] * (self._pieces * len(self._asked)))  # no evidence so far
            # A site without draws has no evidence.
            ensure(len(site.evidence) in (0, self._pieces), "all draws of a draft have as much evidence")
            self._evidence.extend(site.evidence or [0.0] * self._pieces)
            self._asked.append(site.asked)
            self._tokens.extend(site.tokens)
            self._confidences.extend(site.confidences)
            self._below.extend(number.get((*path, token), NO_SITE) for token in site.tokens)
            self._first.append(len(self._tokens))
        self._open.clear()

    def trie(self) -> GuessTrie:
        """Return the trie of all closed roots."""
        return GuessTrie(
            roots=np.array(self._roots, dtype=np.int32),
            first=np.array(self._first, dtype=np.int64),
            asked=np.array(self._asked, dtype=np.int32),
            evidence=np.array(self._evidence).reshape(len(self._asked), self._pieces),
            tokens=np.array(self._tokens, dtype=np.int32),
            confidences=np.array(self._confidences),
            below=np.array(self._below, dtype=np.int32),
        )
