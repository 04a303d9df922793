"""llama.cpp through the C functions of llama-cpp-python, or ik_llama.cpp's, in its own environment.

    python run_llama_cpp.py llama_cpp                            a child of peers.py and offloading.py
    python run_llama_cpp.py ik_llama                             the same for ik-llama-cpp-python
    python run_llama_cpp.py nats MODEL.gguf THREADS              costs of answers, for perplexity.py
    python run_llama_cpp.py quantize MODEL.gguf TARGET Q8_0      one of llama.cpp's own types

Its Python class copies logits and samples in numpy, which costs a quarter of a 135M model's speed; calling
the library is as fast as llama.cpp's own programs. With a draft model it works as they do: the draft proposes
a chain of `draft_tokens` tokens, and the target checks them in one pass. The draft is in private memory, not
mapped, because mapped pages would be read again each time beside a target larger than memory.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
from run_engines import Answer, Arrived, Setup, serve, timed

if IK := sys.argv[1] == "ik_llama":
    import ik_llama_cpp
    from ik_llama_cpp import _ctypes_api as api
else:
    import llama_cpp
    import llama_cpp as api


class Model:
    """A model with the tokens in its cache."""

    def __init__(self, path: str, setup: Setup, **options: Any) -> None:
        options |= {"n_ctx": setup["context"], "n_threads": setup["threads"], "verbose": False}
        if IK:
            self._llama = ik_llama_cpp.IkLlama(path, **options)
            self._vocabulary, self._most = self._llama._model.n_vocab, api.llama_n_ubatch(self._llama.ctx)
        else:
            self._llama = llama_cpp.Llama(path, n_threads_batch=setup["threads"], **options)
            self._vocabulary, self._most = self._llama.n_vocab(), self._llama.n_batch
        self._held: list[int] = []

    def forget(self) -> None:
        """Clear the cache, so that no prompt reuses another's prefix."""
        self._held = []

    def choices(self, tokens: list[int], wanted: int = 1) -> list[int]:
        """Run `tokens`, a whole text; return the choices after each of the last `wanted`.

        Drops the cache of another text first.
        """
        keep = min(common(self._held, tokens), len(tokens) - wanted)
        self._cut(keep)
        chosen: list[int] = []
        for begin in range(keep, len(tokens), self._most):
            chosen += self._run(begin, tokens[begin : begin + self._most], len(tokens) - wanted)
        self._held = [*tokens]
        return chosen

    def _cut(self, keep: int) -> None:
        """Leave `keep` tokens in the cache."""
        if IK:
            remove = api._lib.llama_kv_cache_seq_rm
            remove(ctypes.c_void_p(self._llama.ctx), *map(ctypes.c_int32, (0, keep, -1)))
        else:
            api.llama_memory_seq_rm(api.llama_get_memory(self._llama.ctx), 0, keep, -1)

    def _run(self, begin: int, piece: list[int], first: int) -> list[int]:
        """Return the choices after the tokens of a piece, from position `first` on."""
        batch = api.llama_batch_init(len(piece), 0, 1)
        batch.n_tokens = len(piece)
        for i, token in enumerate(piece):
            batch.token[i], batch.pos[i] = token, begin + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = begin + i >= first
        code = api.llama_decode(self._llama.ctx, batch)
        api.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._choice(i) for i in range(len(piece)) if begin + i >= first]

    def _choice(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self._llama.ctx, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def common(some: list[int], others: list[int]) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(some, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def start(setup: Setup) -> tuple[Answer, dict[str, Any]]:
    options = dict(setup["options"])
    ahead = options.pop("draft_tokens", 0)
    draft = Model(setup["draft"], setup, use_mmap=False) if setup["draft"] else None
    target = Model(setup["model"], setup, **options)
    models = [target] if draft is None else [draft, target]

    def generate(prompt: list[int], max_tokens: int, arrived: Arrived) -> None:
        for model in models:
            model.forget()
        text = [*prompt]
        end = len(prompt) + max_tokens
        while len(text) < end:
            guesses: list[int] = []
            while draft is not None and len(guesses) < min(ahead, end - len(text) - 1):
                guesses += draft.choices([*text, *guesses])
            chosen = target.choices([*text, *guesses], len(guesses) + 1)
            new = chosen[: common(guesses, chosen) + 1]
            text += new
            arrived(new)

    package = ik_llama_cpp if IK else llama_cpp
    versions = {f"{package.__name__.replace('_', '-')}-python": package.__version__}
    return timed(generate), {"versions": versions}


def nats(path: str, threads: str) -> None:
    """Print the version, and the negative log likelihood of answers in nats, as JSON.

    Standard input is a list of [prompt, answer] pairs of token ids. A pair is one batch with the KV cache in
    float32.
    """
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
    found = []
    for prompt, answer in pairs:
        llama.reset()
        llama.eval([*prompt, *answer[:-1]])
        first = len(prompt) - 1
        logits = llama.scores[first : first + len(answer)].astype(np.float64)
        most = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
        found.append(float((sums - logits[np.arange(len(answer)), answer]).sum()))
    print(json.dumps({"version": llama_cpp.__version__, "nats": found}))


def quantize(source: str, target: str, kind: str) -> None:
    """Convert a GGUF file; every tensor is dequantized to float32 first, as by llama.cpp's own program."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    if code := llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit(f"llama_model_quantize returned {code} for {source}")


if __name__ == "__main__":
    if sys.argv[1] in ("llama_cpp", "ik_llama"):
        serve(start)
    else:
        {"nats": nats, "quantize": quantize}[sys.argv[1]](*sys.argv[2:])
