"""Draws from a draft model's logits, by the four rules of docs/losslessness.md.

    POINT_MASS            the k most likely tokens
    COUPLED               the k largest of log q / T + the noise that the target uses at that position
    IID                   k independent samples of q
    WITHOUT_REPLACEMENT   k samples of q, each without the ones before it

Greedy requests always get the k most likely tokens, the limit of all four rules for T -> 0.
"""

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
from specinfer.verify.target_law import NUMPY_ROW, Law, RowScan, inverse_cdf, target_law


@dataclass(frozen=True, slots=True)
class Site:
    """A frontier node to extend, with the parameters of its children's distribution."""

    builder: TreeBuilder
    speculator: str  # name of the draft
    node: int
    width: int  # draws to make
    params: SamplingParams
    seed: int
    position: int  # absolute position of the children's tokens
    uniforms: Callable[[], float]  # returns the next number in [0, 1) of this tree's random stream
    rule: DrawRule
    processed: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None  # applies logit processors
    min_probability: float = 0.0  # minimum probability of draws after the first; not for samples

    @property
    def draws_by(self) -> DrawRule:
        """The effective rule, POINT_MASS for greedy requests."""
        return DrawRule.POINT_MASS if self.params.greedy else self.rule

    @property
    def temperature(self) -> float:
        """Temperature of the draft's confidences."""
        return 1.0 if self.draws_by is DrawRule.POINT_MASS else self.params.temperature

    @property
    def candidates(self) -> int:
        """Number of likeliest tokens that suffice for the draws; 0 if the whole row is needed."""
        params, rule = self.params, self.draws_by
        if self.processed is not None:
            return 0
        if rule is DrawRule.POINT_MASS:
            return max(self.width, 2)  # two for the evidence
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return max(self.width, POOL) if rule is DrawRule.COUPLED and not filtered else 0


def draw_children(flight: Flight, sites: Sequence[Site], vocabulary: DraftVocabulary | None = None) -> None:
    """Add the children of every site to its tree; row f of `flight` belongs to sites[f].

    The logits belong to `vocabulary` if it is given. A site gets no children if its parameters exclude every
    token or its logits are not finite. A draw's evidence is the probabilities of the two likeliest tokens.
    """
    rows = [row for row, site in enumerate(sites) if site.candidates]
    likeliest = iter(_likeliest(flight, rows, sites) if rows else ())  # one scan per level
    for row, site in enumerate(sites):
        if site.candidates:
            _from_likeliest(site, *next(likeliest), vocabulary)
        else:
            # If the grammar is too complex, verification raises this error for the request.
            with suppress(RequestError, LogitsError):
                _from_row(site, flight.row(row), vocabulary, flight.scan)


def _likeliest(
    flight: Flight, rows: Sequence[int], sites: Sequence[Site]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], float]]:
    """Yield the likeliest tokens of each row, their logits, and the mass of all tokens."""
    widest = max(sites[row].candidates for row in rows)
    found = flight.likeliest(rows, widest, [sites[row].temperature for row in rows])
    for i, row in enumerate(rows):
        # Cut to the number of this site, as another site may need more.
        count = min(int(found.found[i]), sites[row].candidates)
        yield found.ids[i, :count], found.values[i, :count], float(found.masses[i])


def _from_likeliest(
    site: Site,
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    mass: float,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Draw from the likeliest tokens in falling order, with their logits and the mass of all tokens."""
    if not len(ids):  # logits that are not finite
        return
    tokens = ids if vocabulary is None else vocabulary.ids[ids]
    weights = np.exp((values.astype(np.float64) - float(values[0])) / site.temperature)
    if site.draws_by is DrawRule.COUPLED:
        law = Law(values, tokens, 0, site.temperature, int(tokens.max()) + 1)
        drawn = fastest(law, np.arange(len(ids)), site.seed, site.position, site.width)
    else:
        drawn = np.arange(min(site.width, len(ids)))
    _add(site, tokens[drawn], weights[drawn] / mass, weights[:2] / mass)


def _from_row(
    site: Site, row: NDArray[np.float32], vocabulary: DraftVocabulary | None, scan: RowScan
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
        _sample(site, _law(row, site.params, vocabulary, scan).distribution(), rule)
        return
    best = most_likely_ids(row, 2, vocabulary, scan)
    known = probabilities(row, np.concatenate([tokens, best]), site.temperature, vocabulary, scan)
    _add(site, tokens, known[: len(tokens)], known[len(tokens) :])


def most_likely_ids(
    logits: NDArray[np.float32], k: int, vocabulary: DraftVocabulary | None = None, scan: RowScan = NUMPY_ROW
) -> NDArray[np.int64]:
    """Return the k most likely tokens, most likely first."""
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
    """Return the k proposals of a coupled speculator after one row of its logits, best first.

    They are the coupled top-k of its law. If filters leave fewer than k tokens, the next most likely ones
    follow, as the target's law may be wider; so greedy requests get the k most likely tokens. Returns fewer
    than k only if fewer have a probability. Raises as `target_law` does.
    """
    ids = coupled_top_k(_law(logits, params, vocabulary, scan), seed, position, k, scan=scan)
    if ids.shape[0] == k:
        return ids
    # The law's ids are the most likely ones in some order, so tokens of lower rank are new.
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
    """Return a draft's probability of each token at a temperature, before top-k, top-p and min-p."""
    entries = tokens if vocabulary is None else np.searchsorted(vocabulary.ids, tokens)
    highest = float(logits.max())
    weights = np.exp((logits[entries].astype(np.float64) - highest) / temperature)
    return np.asarray(weights / scan.mass(logits, highest, temperature))


def _add(
    site: Site, tokens: NDArray[np.int64], confidences: NDArray[np.float64], best: NDArray[np.float64]
) -> None:
    name, rule, evidence = site.speculator, site.draws_by, tuple(best.tolist())
    for i, (token, confidence) in enumerate(zip(tokens.tolist(), confidences.tolist(), strict=True)):
        if i == 0 or confidence >= site.min_probability:
            site.builder.add(site.node, token, name, rule, confidence=confidence, evidence=evidence)


def _sample(site: Site, law: Distribution, rule: DrawRule) -> None:
    left = law.probabilities
    evidence = tuple(np.sort(left)[:-3:-1].tolist())
    for turn in range(site.width):
        # Whether a draw is made may depend on earlier draws, never on its own value.
        if site.builder.full or not left.any():
            return
        place = inverse_cdf(left, site.uniforms())
        confidence = float(law.probabilities[place])
        site.builder.add(site.node, law.id_at(place), site.speculator, rule, law, confidence, evidence)
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left = left.copy() if turn == 0 else left
            left[place] = 0.0
