"""Flights with made-up logits instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.engine.target_laws import TargetLaws
from specinfer.runtime.flight import Flight
from specinfer.tree import TokenTree
from specinfer.tree.draw import Verifier
from specinfer.verify.coupled import Acceptance, coupled_choice
from specinfer.verify.scan import NUMPY, Scan

Mutant = Callable[[TokenTree, TargetLaws, Verifier], Acceptance]


def flight_of(logits_RV: NDArray[np.float32]) -> Flight:
    """Return a Flight with these logits."""
    return flight_over(torch.from_numpy(logits_RV), NUMPY)


def flight_over(logits_RV: Tensor, scan: Scan) -> Flight:
    """Return a Flight whose output layer has these logits."""
    return Flight(logits_RV, lambda rows: rows, logits_RV.shape[1], scan)


def choose(laws: TargetLaws, node: int) -> int:
    """Return the target's own choice after `node`, from its law."""
    return coupled_choice(laws.law(node), laws.request.seed, laws.position(node))


def each_tree(mutant: Mutant) -> Callable[[Sequence[TargetLaws], Verifier, Flight], list[Acceptance]]:
    """Make a broken `verify_trees` from a mutant of the verification of one tree."""
    return lambda laws, verifier, flight: [mutant(one.tree, one, verifier) for one in laws]


def accept_everything(tree: TokenTree, laws: TargetLaws, verifier: Verifier) -> Acceptance:
    """A mutant that accepts the first branch to its end."""
    path, node = [], 0
    while children := tree.children()[node]:
        node = next(iter(children.values()))
        path.append(node)
    return Acceptance(tuple(path), choose(laws, node))
