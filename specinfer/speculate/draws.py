"""How a draft model's logits become draws: the four rules of docs/losslessness.md.

    POINT_MASS            the k most likely tokens
    COUPLED               the k largest of log q / T + the noise the target will use at that position
    IID                   k independent samples of q
    WITHOUT_REPLACEMENT   k samples of q, each without the ones before it

Greedy requests always get the k most likely tokens: that is what all four become as T -> 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.distribution import Distribution
from specinfer.verify.coupled import coupled_top_k
from specinfer.verify.law import Law, inverse_cdf
from specinfer.verify.scan import NUMPY, Scan
from specinfer.verify.target_law import target_law


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


def draw_children(
    logits_FV: Sequence[NDArray[np.float32]],
    sites: Sequence[Site],
    speculator: str,
    vocabulary: DraftVocabulary | None = None,
    scan: Scan = NUMPY,
) -> None:
    """Add the children of every site to its tree; row f of `logits_FV` belongs to sites[f].

    The logits are those of `vocabulary` where there is one. A site whose parameters leave no token gets no
    children.
    """
    for row, site in zip(logits_FV, sites, strict=True):
        kept = vocabulary
        if site.processed is not None:
            try:
                row = site.processed(row if kept is None else kept.widened(row))
            except RequestError:  # a grammar too complex to follow: the target will say so
                continue
            if row.max() == -np.inf:
                continue
            kept = None
        if site.params.greedy or site.rule is DrawRule.POINT_MASS:
            tokens = most_likely_ids(row, site.width, kept, scan)
            confidences = probabilities(row, tokens, 1.0, kept, scan)
            _add(site, tokens, confidences, DrawRule.POINT_MASS, speculator)
        elif site.rule is DrawRule.COUPLED:
            tokens = coupled_children(row, site.params, site.seed, site.position, site.width, kept, scan)
            confidences = probabilities(row, tokens, site.params.temperature, kept, scan)
            _add(site, tokens, confidences, site.rule, speculator)
        else:
            _sample(site, _law(row, site.params, kept, scan).distribution(), site.rule, speculator)


def most_likely_ids(
    logits: NDArray[np.float32], k: int, vocabulary: DraftVocabulary | None = None, scan: Scan = NUMPY
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
    scan: Scan = NUMPY,
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
    logits: NDArray[np.float32], params: SamplingParams, vocabulary: DraftVocabulary | None, scan: Scan
) -> Law:
    law = target_law(logits, params, scan)
    return law if vocabulary is None else law.renamed(vocabulary.ids, vocabulary.size)


def probabilities(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int64],
    temperature: float,
    vocabulary: DraftVocabulary | None = None,
    scan: Scan = NUMPY,
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
    rule: DrawRule,
    speculator: str,
) -> None:
    for token, confidence in zip(tokens.tolist(), confidences.tolist(), strict=True):
        site.builder.add(site.node, token, speculator, rule, confidence=confidence)


def _sample(site: Site, law: Distribution, rule: DrawRule, speculator: str) -> None:
    left = law.probabilities
    for turn in range(site.width):
        # Whether there is another draw may depend on the draws before it, never on its own value.
        if site.builder.full or not left.any():
            return
        place = inverse_cdf(left, site.uniforms())
        confidence = float(law.probabilities[place])
        site.builder.add(site.node, law.id_at(place), speculator, rule, law, confidence)
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left = left.copy() if turn == 0 else left
            left[place] = 0.0
