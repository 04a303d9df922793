"""The law of the engine's output, compared with the tiny target's law.

Exactness is proved by enumeration in tests/exact; here nothing is enumerated: model, caches, speculators,
batching and verifier run as they do in service, and the first three tokens of many seeded requests are
counted. Per case the chi-square statistics of the triples, and of the pairs that come from a tree, are
compared with their distributions; the p-value of the case is twice the smaller one. The threshold is
p > 1e-4: seeds are fixed, so a case that passes once always passes; of 10 honest cases one in a thousand
runs of *new* seeds would fail. With 1500 requests 99 of 100 runs fall below it where the probabilities of
pairs are wrong by a quarter of themselves (root mean square), or those of triples by a third. A verifier
that accepts i.i.d. draws of a top-k gives p < 1e-30, as the last test shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specinfer.runtime.batch import chain_rows
from specinfer.runtime.runner import ModelRunner, as_rows
from specinfer.sampling_params import SamplingParams
from specinfer.tree import DrawRule
from specinfer.verify.target_law import target_law
from tests import goodness
from tests.engines import Tiny, write_tiny
from tests.kernels import kernels
from tests.switched import RECURRENT, SWITCHED, switched_tiny

pytestmark = pytest.mark.slow  # thousands of requests

VOCAB = 6
PROMPT = [1, 4, 2, 1, 4]
REQUESTS = 1500


# A spread of 0.15 makes laws flat enough that every triple of tokens is expected some times.
SHAPE = {"vocab_size": VOCAB, "spread": 0.15, "max_context": 32}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), kernels("native"), **SHAPE)


def exact_law(tiny: Tiny, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every triple of tokens after PROMPT, from the target alone."""
    runner = ModelRunner(tiny.target, num_blocks=1, block_size=32)

    def law(text: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return target_law(as_rows(runner.forward([chain_rows(text, 0, [0], logits=True)]))[0], params).dense()

    triples: dict[tuple[int, ...], float] = {}
    for a, b in itertools.product(range(VOCAB), repeat=2):
        first = law(PROMPT)[a] * law([*PROMPT, a])[b]
        triples |= {(a, b, c): first * p for c, p in enumerate(law([*PROMPT, a, b]))}
    return triples


def p_value(tiny: Tiny, options: dict[str, Any], sampling: dict[str, Any]) -> float:
    llm = tiny.llm(**{"max_batch_size": 64, **options})
    # Three tokens are the first from the prompt and two from a tree; a fourth keeps that tree deep.
    params = [SamplingParams(max_tokens=4, seed=seed, **sampling) for seed in range(REQUESTS)]
    counts: dict[tuple[int, ...], int] = {}
    for output in llm.generate([PROMPT] * REQUESTS, params):
        triple = output.token_ids[:3]
        counts[triple] = counts.get(triple, 0) + 1
    law = exact_law(tiny, SamplingParams(**sampling))
    assert all(law[triple] > 0 for triple in counts), "a token outside the law came out"
    return min(1.0, 2 * min(chi_square(counts, law), chi_square(without_first(counts), without_first(law))))


def without_first(numbers: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Return the same statistics for the last two tokens of triples."""
    pairs: dict[tuple[int, ...], float] = {}
    for (_, *pair), number in numbers.items():
        pairs[tuple(pair)] = pairs.get(tuple(pair), 0) + number
    return pairs


def chi_square(counts: Mapping[tuple[int, ...], float], law: Mapping[tuple[int, ...], float]) -> float:
    # Outcomes expected less than five times are merged, as the chi-square test requires.
    rare = [t for t, p in law.items() if p * REQUESTS < 5]
    bins = [(counts.get(t, 0), p * REQUESTS) for t, p in law.items() if p * REQUESTS >= 5]
    if sum(law[t] for t in rare) * REQUESTS >= 5:
        bins.append((sum(counts.get(t, 0) for t in rare), sum(law[t] for t in rare) * REQUESTS))
    seen, expected = np.array(bins).T
    return float(goodness.chi_square(seen, expected * seen.sum() / expected.sum()))


ONE: dict[str, Any] = {"temperature": 1.0}
CUT: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 0.95}
TWO = ["similar", "stranger"]


# Texts of the coupled verifier are the target's own, seed by seed (tests/unit/engine): one count does.
@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"drafts": TWO, "lookup": True, "expansion": (2, 2)}, ONE),
        ({"drafts": TWO, "verifier": "mss", "draw": "iid", "expansion": (2, 2)}, ONE),
        ({"drafts": TWO, "verifier": "mss", "lookup": True, "expansion": (2, 2)}, ONE),
        ({"drafts": TWO, "verifier": "mss", "lookup": True, "expansion": (2, 2)}, CUT),
        ({"drafts": ["stranger"], "verifier": "mss", "expansion": (3, 3), "max_nodes": 6}, ONE),
    ],
    ids=[
        *("coupled", "mss, iid", "mss, without replacement and lookup", "mss, from a cut law"),
        "mss, small budget",
    ],
)
def test_three_tokens_follow_the_law(tiny: Tiny, options: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert p_value(tiny, options, sampling) > 1e-4


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("options", [{}, {"draw": "iid"}, {"prefix_reuse": False, "lookup": True}], ids=str)
def test_the_law_of_models_with_recurrent_layers(tiny: Tiny, name: str, options: dict[str, Any]) -> None:
    flat = replace(SWITCHED[name], vocab_size=VOCAB, max_context=32, logit_scale=0.5)
    hybrid = switched_tiny(flat, tiny.tokenizer)
    drafted = {"drafts": TWO, "verifier": "mss", "expansion": (2, 2), **options}
    assert p_value(hybrid, drafted, ONE) > 1e-4


@pytest.mark.parametrize(
    ("options", "batch"),
    [({"verifier": "mss"}, 2), ({"verifier": "mss"}, 64), ({"verifier": "mss", "draw": "iid"}, 2)],
    ids=["mss, 2", "mss, 64", "mss, iid, 2"],
)
def test_int4_drafts_leave_the_law_as_it_is(tmp_path: Path, options: dict[str, Any], batch: int) -> None:
    """A draft in int4 may compute few rows otherwise than many (kernels/quantized.py): both within a run."""
    quantized = write_tiny(tmp_path, kernels("native"), "int4", **SHAPE)
    drafted = {"drafts": ["similar", "stranger"], "expansion": (2, 2), "max_batch_size": batch, **options}
    assert p_value(quantized, drafted, {"temperature": 1.0}) > 1e-4


def test_the_same_count_catches_a_biased_engine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    # The classic mistake: the draft's top-k, verified as if it had been sampled.
    from specinfer.speculate.drafts import draft as drafting
    from specinfer.speculate.drafts import draws
    from specinfer.verify.target_law import most_likely, target_law

    def top_k_called_samples(flight: Any, sites: Any, *_: Any) -> None:
        for row, site in enumerate(sites):
            law = target_law(flight.row(row), site.params).dense()
            for token in most_likely(flight.row(row), site.width).tolist():
                site.builder.add(site.node, token, site.speculator, DrawRule.IID, law)

    monkeypatch.setattr(drafting, "draw_children", top_k_called_samples)
    assert draws.draw_children is not top_k_called_samples
    options = {"drafts": ["stranger"], "verifier": "mss", "draw": "iid", "expansion": (2, 2)}
    assert p_value(tiny, options, {"temperature": 1.0}) < 1e-30
