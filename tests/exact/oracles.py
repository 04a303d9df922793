"""Sampling parameters applied the long way: a full sort, one filter after the other."""

import math


def processed_law(logits, params):
    """The law of the next token, a list of floats, [vocab]."""
    values = [float(x) for x in logits]
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))  # equal logits: lowest id first
    if params.greedy:
        return [float(t == order[0]) for t in range(len(values))]
    top = values[order[0]]
    p = normalised([math.exp((x - top) / params.temperature) for x in values])
    if params.top_k:
        kept = set(order[: params.top_k])
        p = normalised([mass if t in kept else 0.0 for t, mass in enumerate(p)])
    kept = set()
    reached = 0.0
    for t in order:
        if reached < params.top_p:
            kept.add(t)
        reached += p[t]
    p = normalised([mass if t in kept else 0.0 for t, mass in enumerate(p)])
    return normalised([mass if mass >= params.min_p * max(p) else 0.0 for mass in p])


def normalised(weights):
    total = math.fsum(weights)
    return [weight / total for weight in weights]
