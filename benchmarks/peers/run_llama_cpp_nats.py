"""Computes the cost of given answers with llama.cpp: python run_llama_cpp_nats.py MODEL.gguf THREADS

Reads a list of [prompt, answer] pairs of token ids as JSON, and prints as JSON the version and each answer's
negative log likelihood in nats. A pair is one batch with the KV cache in float32.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main(path: str, threads: str) -> None:
    """Print the costs of the pairs on standard input."""
    pairs = json.load(sys.stdin)
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    llama = llama_cpp.Llama(
        path,
        n_ctx=longest,
        n_batch=longest,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        logits_all=True,
        verbose=False,
    )
    nats = []
    for prompt, answer in pairs:
        llama.reset()
        llama.eval([*prompt, *answer[:-1]])
        first = len(prompt) - 1
        logits = llama.scores[first : first + len(answer)].astype(np.float64)
        most = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
        nats.append(float((sums - logits[np.arange(len(answer)), answer]).sum()))
    print(json.dumps({"version": llama_cpp.__version__, "nats": nats}))


if __name__ == "__main__":
    main(*sys.argv[1:])
