"""llama.cpp as a worker of benchmarks/peers.py, through the C functions of llama-cpp-python.

Its Python class copies logits and samples in numpy, which costs a quarter of the speed of a 135M model;
calling the library is as quick as llama.cpp's own programs.
"""

from __future__ import annotations

import llama_cpp
import numpy as np
from worker import Arrived, Generate, Setup, serve


def start(setup: Setup) -> tuple[Generate, dict[str, str]]:
    llama = llama_cpp.Llama(
        setup["model"],
        n_ctx=setup["context"],
        n_threads=setup["threads"],
        n_threads_batch=setup["threads"],
        verbose=False,
        **setup["options"],
    )
    context, vocab = llama.ctx, llama.n_vocab()

    def decode(tokens: list[int]) -> int:
        """Run tokens behind those already run, in pieces of a batch, and choose the next one."""
        for begin in range(0, len(tokens), llama.n_batch):
            piece = tokens[begin : begin + llama.n_batch]
            array = (llama_cpp.llama_token * len(piece))(*piece)  # the batch points into it
            code = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(piece)))
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab,))
        return int(logits.argmax())

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = prompt
        for _ in range(max_tokens):
            tokens = [decode(tokens)]
            arrived(tokens)

    return generate, {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    serve(start)
