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
from specinfer.runtime.sampling import coupled_children, target_law
from specinfer.sampling_params import SamplingParams
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.verify.law import inverse_cdf, most_likely


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


def draw_children(logits_FV: NDArray[np.float32], sites: Sequence[Site], speculator: str) -> None:
    """Add the children of every site to its tree; row f of `logits_FV` belongs to sites[f].

    A site whose parameters leave no token gets none.
    """
    for row, site in zip(logits_FV, sites, strict=True):
        if site.processed is not None:
            try:
                row = site.processed(row)
            except RequestError:  # a grammar too complex to follow: the target will say so
                continue
            if row.max() == -np.inf:
                continue
        if site.params.greedy or site.rule is DrawRule.POINT_MASS:
            _add(site, most_likely(row, site.width), DrawRule.POINT_MASS, speculator)
        elif site.rule is DrawRule.COUPLED:
            tokens = coupled_children(row, site.params, site.seed, site.position, site.width)
            _add(site, tokens, site.rule, speculator)
        else:
            _sample(site, target_law(row, site.params).dense(), site.rule, speculator)


def _add(site: Site, tokens: NDArray[np.int64], rule: DrawRule, speculator: str) -> None:
    for token in tokens.tolist():
        site.builder.add(site.node, token, speculator, rule)


def _sample(site: Site, law: NDArray[np.float64], rule: DrawRule, speculator: str) -> None:
    left = law
    for _ in range(site.width):
        # Whether there is another draw may depend on the draws before it, never on its own value.
        if site.builder.full or not left.any():
            return
        token = inverse_cdf(left, site.uniforms())
        site.builder.add(site.node, token, speculator, rule, law)
        if rule is DrawRule.WITHOUT_REPLACEMENT:
            left = left.copy()
            left[token] = 0.0
