"""Log-probabilities that are reported to the caller."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specinfer.request import Logprob, Logprobs
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import Tokenizer
from specinfer.verify.target_law import target_law


def raw_logprobs(logits_V: NDArray[np.float32]) -> NDArray[np.float64]:
    """The model's own log-probabilities, [vocab]: no temperature, no processor, no filter."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def processed_logprobs(logits_V: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Log-probabilities of the law tokens are chosen from, [vocab]; -inf where it excludes them.

    `logits_V` are the processed logits. At temperature 0, where that law is a point mass, they are taken at
    temperature 1 without filters, as in vLLM: the argmax is the same, and a number says how close it was.
    """
    if params.greedy:
        return raw_logprobs(logits_V)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(target_law(logits_V, params).dense()))


def report(logprobs_V: NDArray[np.float64], chosen: int, top: int, tokenizer: Tokenizer) -> Logprobs:
    """The figures of the chosen token and of the `top` likeliest, the chosen one first.

    The rank of a token is one more than the number of likelier ones.
    """
    ranks = {chosen: int((logprobs_V > logprobs_V[chosen]).sum()) + 1}
    likeliest = _likeliest(logprobs_V, top)
    falling = -logprobs_V[likeliest]  # whatever is likelier than one of them is one of them
    ranks.update(zip(likeliest, (np.searchsorted(falling, falling) + 1).tolist(), strict=True))
    return {
        token: Logprob(logprob=float(logprobs_V[token]), rank=rank, text=tokenizer.text_of(token))
        for token, rank in ranks.items()
    }


def _likeliest(logprobs_V: NDArray[np.float64], n: int) -> list[int]:
    """The ids of the n likeliest tokens, likeliest first, equal ones lowest id first; none of -inf."""
    if n == 0:
        return []
    vocab = logprobs_V.shape[0]
    bound = np.partition(logprobs_V, vocab - n)[vocab - n] if n < vocab else -np.inf
    candidates = np.flatnonzero((logprobs_V >= bound) & (logprobs_V > -np.inf))
    order = np.argsort(-logprobs_V[candidates], kind="stable")
    likeliest: list[int] = candidates[order[:n]].tolist()
    return likeliest
