"""Losses against sums written out, and the coupled hit against races that are run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specinfer.tune.losses import Loss, Shortlist, confidence_losses, coupled_hits, losses, shortlist

NAMED, LABELS = 12, 5


def laws(rows: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a head that can name 12 tokens, labels among these, and what the target gives them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, NAMED, generator=generator)
    entries = torch.stack([torch.randperm(NAMED, generator=generator)[:LABELS] for _ in range(rows)])
    chances = (2 * torch.randn(rows, LABELS + 1, generator=generator)).softmax(dim=1)[:, :LABELS]
    return logits, entries, chances


def whole(entries: torch.Tensor, chances: torch.Tensor) -> Shortlist:
    return shortlist(entries, chances, NAMED, NAMED, torch.Generator())


def written_out(
    kind: Loss, logits: torch.Tensor, entries: torch.Tensor, chances: torch.Tensor
) -> list[float]:
    found = []
    for row in range(len(logits)):
        q_all = logits[row].double().softmax(0)
        pairs = [
            (float(p), float(q_all[e])) for e, p in zip(entries[row], chances[row], strict=True) if e >= 0
        ]
        kl = sum(p * math.log(p / q) for p, q in pairs)
        alike = sum(min(p, q) for p, q in pairs)
        w = math.exp(-3 * alike)
        rest = (1 - sum(p for p, _ in pairs), 1 - sum(q for _, q in pairs))
        hit = sum(1 / sum(max(a / p, b / q) for a, b in [*pairs, rest]) for p, q in pairs)
        found.append(
            {
                "kl": kl,
                "tv": 1 - alike,
                "hybrid": w * kl + (1 - w) * (1 - alike),
                "coupled": 0.3 * kl + 0.7 * (1 - hit),
            }[kind]
        )
    return found


@pytest.mark.parametrize("kind", ["kl", "tv", "hybrid", "coupled"])
def test_each_loss_is_its_sum_written_out(kind: Loss) -> None:
    logits, entries, chances = laws()
    entries[1, 2] = -1  # a label that the head cannot name
    got = losses(kind, logits, whole(entries, chances))
    assert got.tolist() == pytest.approx(written_out(kind, logits, entries, chances), abs=1e-5)


@pytest.mark.parametrize("kind", ["kl", "tv", "hybrid", "coupled"])
def test_gradients_are_those_of_finite_differences(kind: Loss) -> None:
    logits, entries, chances = (x.double() if x.is_floating_point() else x for x in laws(rows=2))
    short = whole(entries, chances)
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


def test_the_coupled_hit_is_how_often_races_with_shared_noise_end_alike() -> None:
    generator = np.random.default_rng(0)
    p, q = (generator.dirichlet(np.full(6, 0.6)) for _ in range(2))
    noise = generator.exponential(size=(200_000, 6))
    alike = float(((noise / p).argmin(axis=1) == (noise / q).argmin(axis=1)).mean())
    hit = coupled_hits(torch.tensor(p[None]), torch.tensor(q[None]).log())
    assert float(hit) == pytest.approx(alike, abs=0.005)


def test_what_is_said_of_guesses_is_held_against_their_hits() -> None:
    logits, entries, chances = laws(rows=3)
    short, said = whole(entries, chances), torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    found = confidence_losses(said, logits.requires_grad_(), short)
    hits = coupled_hits(short.chances_RK, logits.log_softmax(-1).gather(1, short.places_RK)).detach()
    right = torch.sigmoid(said.detach())
    expected = -(hits * right.log() + (1 - hits) * (1 - right).log())
    np.testing.assert_allclose(found.detach(), expected, atol=1e-5)
    found.sum().backward()
    assert logits.grad is None
    np.testing.assert_allclose(said.grad, right - hits, atol=1e-5)


def test_what_neither_law_lists_is_no_hit() -> None:
    p = torch.tensor([[0.5, 0.0]])  # the second is no label: only its q is known
    assert float(coupled_hits(p, torch.tensor([[0.5, 0.3]]).log())) == pytest.approx(0.5)
    assert float(coupled_hits(torch.zeros(1, 2), torch.tensor([[0.5, 0.3]]).log())) == 0.0


def test_a_shortlist_has_the_likeliest_labels_and_stands_for_the_rest() -> None:
    logits, entries, chances = laws(rows=1)
    full = float(logits[0].exp().sum())
    sums = []
    for seed in range(4000):
        short = shortlist(entries, chances, NAMED, 8, torch.Generator().manual_seed(seed))
        assert len(set(short.entries_S.tolist())) == 8
        assert set(entries[0].tolist()) <= set(short.entries_S.tolist()[:6])
        assert torch.equal(short.entries_S[short.places_RK], entries)
        sums.append(float((logits[0, short.entries_S] + short.raised_S).exp().sum()))
    assert np.mean(sums) == pytest.approx(full, rel=0.02)


def test_labels_that_were_only_drawn_are_not_learnt() -> None:
    _, entries, chances = laws(rows=8)
    short = shortlist(entries, chances, NAMED, 4, torch.Generator().manual_seed(1))
    kept = short.chances_RK > 0
    assert torch.equal(short.entries_S[short.places_RK][kept], entries[kept])
    assert bool((short.places_RK[kept] < 3).all())
    assert 0 < int(kept.sum()) < kept.numel()
