"""Losses against sums written out, and the shortlists they are computed on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specinfer.tune.losses import LOSSES, Loss, Shortlist, losses, shortlist

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


def written_out(kind: Loss, logits: torch.Tensor, entries: torch.Tensor, probs: torch.Tensor) -> list[float]:
    found = []
    for row in range(len(logits)):
        q_all = logits[row].double().softmax(0)
        pairs = [(float(p), float(q_all[e])) for e, p in zip(entries[row], probs[row], strict=True) if e >= 0]
        kl = sum(p * math.log(p / q) for p, q in pairs)
        alike = sum(min(p, q) for p, q in pairs)
        w = math.exp(-3 * alike)
        found.append({"kl": kl, "hybrid": w * kl + (1 - w) * (1 - alike)}[kind])
    return found


@pytest.mark.parametrize("kind", LOSSES)
def test_each_loss_is_its_sum_written_out(kind: Loss) -> None:
    logits, entries, probs = laws()
    entries[1, 2] = -1  # a label outside the head's vocabulary
    got = losses(kind, logits, whole(entries, probs))
    assert got.tolist() == pytest.approx(written_out(kind, logits, entries, probs), abs=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_finite_differences(kind: Loss) -> None:
    logits, entries, probs = (x.double() if x.is_floating_point() else x for x in laws(rows=2))
    short = whole(entries, probs)
    # The weight of the hybrid is not learnt: it is held where it is.
    if kind == "hybrid":
        logits.requires_grad_()
        losses(kind, logits, short).sum().backward()
        assert logits.grad is not None
        assert bool(logits.grad.isfinite().all())
        assert float(logits.grad.abs().sum()) > 0.01
        return
    assert torch.autograd.gradcheck(
        lambda x: losses(kind, x, short), (logits.requires_grad_(),), eps=1e-6, atol=1e-4
    )


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
