"""The loss against its sum written out, and the shortlists it is computed on."""

import math

import numpy as np
import pytest
import torch

from specinfer.tune.losses import Shortlist, losses, shortlist

NUM_TOKENS, LABELS = 12, 5


def laws(rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a head with 12 tokens, labels among these, and what the target gives them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, NUM_TOKENS, generator=generator)
    entries = torch.stack([torch.randperm(NUM_TOKENS, generator=generator)[:LABELS] for _ in range(rows)])
    probs = (2 * torch.randn(rows, LABELS + 1, generator=generator)).softmax(dim=1)[:, :LABELS]
    return logits, entries, probs


def whole(entries: torch.Tensor, probs: torch.Tensor) -> Shortlist:
    return shortlist(entries, probs, NUM_TOKENS, NUM_TOKENS, torch.Generator())


def test_the_loss_is_its_sum_written_out() -> None:
    logits, entries, probs = laws()
    entries[1, 2] = -1  # a label outside the head's vocabulary
    expected = []
    for row in range(len(logits)):
        q_all = logits[row].double().softmax(0)
        pairs = [(float(p), float(q_all[e])) for e, p in zip(entries[row], probs[row], strict=True) if e >= 0]
        alike = sum(min(p, q) for p, q in pairs)
        w = math.exp(-3 * alike)
        expected.append(w * sum(p * math.log(p / q) for p, q in pairs) + (1 - w) * (1 - alike))
    got = losses(logits, whole(entries, probs))
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_shortlist_has_the_likeliest_labels_and_stands_for_the_rest() -> None:
    logits, entries, probs = laws(rows=1)
    full = float(logits[0].exp().sum())
    sums = []
    for seed in range(4000):
        short = shortlist(entries, probs, NUM_TOKENS, 8, torch.Generator().manual_seed(seed))
        assert len(set(short.entries_S.tolist())) == 8
        assert set(entries[0].tolist()) <= set(short.entries_S.tolist()[:6])
        assert torch.equal(short.entries_S[short.places_RK], entries)
        sums.append(float((logits[0, short.entries_S] + short.raised_S).exp().sum()))
    assert np.mean(sums) == pytest.approx(full, rel=0.02)
