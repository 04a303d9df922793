"""How a draft model's logits become draws: the four rules of docs/losslessness.md.

    POINT_MASS            the k most likely tokens
    COUPLED               the k largest of log q / T + the noise the target will use at that position
    IID                   k independent samples of q
    WITHOUT_REPLACEMENT   k samples of q, each without the ones before it

Greedy requests always get the k most likely tokens: that is what all four become as T -> 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import LogitsError, RequestError
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.distribution import Distribution
from specinfer.verify.coupled import POOL, coupled_top_k, fastest
from specinfer.verify.law import Law, inverse_cdf
from specinfer.verify.target_law import NUMPY_ROW, RowScan, target_law


@dataclass(frozen=True, slots=True)
class Site:
    """A frontier node that is to get children, and what their law depends on."""

    builder: TreeBuilder
    node: int
    width: int  # draws to make
    params: SamplingParams
    seed: int
    position: int  # absolute position of the children's tokens
    uniforms: Callable[[], float]  # the next number in [0, 1) of this tree's own stream
    rule: DrawRule
    processed: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None  # of logits
    request_id: str = ""  # whose text it stands in
    least: float = 0.0  # probability of draws that are kept behind the first; not of samples

    @property
    def draws_by(self) -> DrawRule:
        """The rule by which it is drawn here: for greedy requests all are one."""
        return DrawRule.POINT_MASS if self.params.greedy else self.rule

    @property
    def temperature(self) -> float:
        """At which the draft says how likely a token is."""
        return 1.0 if self.draws_by is DrawRule.POINT_MASS else self.params.temperature

    def keeps(self, rank: int, confidence: float) -> bool:
        """Whether a draw becomes a child: the first of them, and others that are likely."""
        return rank == 0 or confidence >= self.least

    @property
    def candidates(self) -> int:
        """How many of the likeliest tokens are all there is to know; 0 where a whole row is."""
        params, rule = self.params, self.draws_by
        if self.processed is not None:
            return 0
        if rule is DrawRule.POINT_MASS:
            return max(self.width, 2)  # two for the evidence
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return max(self.width, POOL) if rule is DrawRule.COUPLED and not filtered else 0


def draw_children(
    flight: Flight, sites: Sequence[Site], speculator: str, vocabulary: DraftVocabulary | None = None
) -> None:
    """Add the children of every site to its tree; row f of `flight` belongs to sites[f].

    The logits are those of `vocabulary` where there is one. A site whose parameters leave no token, or whose
    logits are no numbers, gets no children. A draw's evidence is how likely the two likeliest tokens are.
    """
    rows = [row for row, site in enumerate(sites) if site.candidates]
    likeliest = iter(_likeliest(flight, rows, sites) if rows else ())  # one question for a level
    for row, site in enumerate(sites):
        if site.candidates:
            _from_likeliest(site, *next(likeliest), speculator, vocabulary)
        else:
            # A grammar may be too complex to follow, and then the target will say so.
            with suppress(RequestError, LogitsError):
                _from_row(site, flight.row(row), speculator, vocabulary, flight.scan)


def _likeliest(
    flight: Flight, rows: Sequence[int], sites: Sequence[Site]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], float]]:
    """Of each of these rows the likeliest tokens, their logits, and the mass of all."""
    most = max(sites[row].candidates for row in rows)
    found = flight.likeliest(rows, most, [sites[row].temperature for row in rows])
    for i, row in enumerate(rows):
        # As many as the site alone would get: a neighbour may want more.
        count = min(int(found.found[i]), sites[row].candidates)
        yield found.ids[i, :count], found.values[i, :count], float(found.masses[i])


def _from_likeliest(
    site: Site,
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    mass: float,
    speculator: str,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Draw from the likeliest tokens alone, most likely first: their logits, and the mass of all."""
    if not len(ids):  # no numbers
        return
    tokens = ids if vocabulary is None else vocabulary.ids[ids]
    weights = np.exp((values.astype(np.float64) - float(values[0])) / site.temperature)
    if site.draws_by is DrawRule.COUPLED:
        law = Law(values, tokens, 0, site.temperature, int(tokens.max()) + 1)
        drawn = fastest(law, np.arange(len(ids)), site.seed, site.position, site.width)
    else:
        drawn = np.arange(min(site.width, len(ids)))
    _add(site, tokens[drawn], weights[drawn] / mass, weights[:2] / mass, speculator)


def _from_row(
    site: Site,
    row: NDArray[np.float32],
    speculator: str,
    vocabulary: DraftVocabulary | None,
    scan: RowScan,
) -> None:
    """Draw from a whole row of logits. Raises RequestError and LogitsError."""
    if site.processed is not None:
        row = site.processed(row if vocabulary is None else vocabulary.widened(row))
        if row.max() == -np.inf:
            return
        vocabulary = None
    rule = site.draws_by
    if rule is DrawRule.POINT_MASS:
        tokens = most_likely_ids(row, site.width, vocabulary, scan)
    elif rule is DrawRule.COUPLED:
        tokens = coupled_children(row, site.params, site.seed, site.position, site.width, vocabulary, scan)
    else:
        _sample(site, _law(row, site.params, vocabulary, scan).distribution(), rule, speculator)
        return
    best = most_likely_ids(row, 2, vocabulary, scan)
    known = probabilities(row, np.concatenate([tokens, best]), site.temperature, vocabulary, scan)
    _add(site, tokens, known[: len(tokens)], known[len(tokens) :], speculator)


def most_likely_ids(
    logits: NDArray[np.float32], k: int, vocabulary: DraftVocabulary | None = None, scan: RowScan = NUMPY_ROW
) -> NDArray[np.int64]:
    """The k most likely tokens, most likely first."""
    entries = scan.most_likely(logits, k)
    return entries if vocabulary is None else vocabulary.ids[entries]


def coupled_children(
    logits: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    k: int,
    vocabulary: DraftVocabulary | None = None,
    scan: RowScan = NUMPY_ROW,
) -> NDArray[np.int64]:
    """The k tokens a coupled speculator should propose after one row of its logits, best first.

    Its law's coupled top-k first; where the filters leave it fewer than k, the next most likely tokens,
    since the target's law may be wider. Greedy is therefore the k most likely tokens. Fewer than k come
    back only when fewer have a probability. Raises as `target_law`.
    """
    ids = coupled_top_k(_law(logits, params, vocabulary, scan), seed, position, k, scan=scan)
    if ids.shape[0] == k:
        return ids
    # The law's ids are the most likely ones, in some order, so what follows them in rank is new.
    return np.concatenate([ids, most_likely_ids(logits, k, vocabulary, scan)[ids.shape[0] :]])


def _law(
    logits: NDArray[np.float32], params: SamplingParams, vocabulary: DraftVocabulary | None, scan: RowScan
) -> Law:
    law = target_law(logits, params, scan)
    return law if vocabulary is None else law.renamed(vocabulary.ids, vocabulary.size)


def probabilities(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int64],
    temperature: float,
    vocabulary: DraftVocabulary | None = None,
    scan: RowScan = NUMPY_ROW,
) -> NDArray[np.float64]:
    """How likely each token is at a temperature, before top-k, top-p and min-p: what a draft believes."""
    entries = tokens if vocabulary is None else np.searchsorted(vocabulary.ids, tokens)
    highest = float(logits.max())
    weights = np.exp((logits[entries].astype(np.float64) - highest) / temperature)
    return np.asarray(weights / scan.mass(logits, highest, temperature))


def _add(
    site: Site,
    tokens: NDArray[np.int64],
    confidences: NDArray[np.float64],
    best: NDArray[np.float64],
    speculator: str,
) -> None:
    rule, evidence = site.draws_by, tuple(best.tolist())
    for i, (token, confidence) in enumerate(zip(tokens.tolist(), confidences.tolist(), strict=True)):
        if site.keeps(i, confidence):
            site.builder.add(site.node, token, speculator, rule, confidence=confidence, evidence=evidence)


def _sample(site: Site, law: Distribution, rule: DrawRule, speculator: str) -> None:
    left = law.probabilities
    evidence = tuple(np.sort(left)[:-3:-1].tolist())
    for turn in range(site.width):
        # Whether there is another draw may depend on the draws before it, never on its own value.
        if site.builder.full or not left.any():
            return
        place = inverse_cdf(left, site.uniforms())
        confidence = float(law.probabilities[place])
        site.builder.add(site.node, law.id_at(place), speculator, rule, law, confidence, evidence)
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left = left.copy() if turn == 0 else left
            left[place] = 0.0
