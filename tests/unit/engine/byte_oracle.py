"""Sampling parameters by name, and an oracle of a tiny target's text under them.

The target's tokens are bytes. The oracle (tests/exact/slow_sampling.py) computes the whole text for each
token: no cache, no tree, no batch, no processors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from specinfer import SamplingParams
from specinfer.check.difference import PlainTarget
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.request import FinishReason, RequestOutput
from tests.engines import Tiny
from tests.exact.slow_sampling import Rules, seeded_text

VOCAB, EOS, LENGTH = 128, 5, 16
PROMPTS = [[97, 98, 99, 97, 98, 99, 97, 98], [33], [64, 65, 66, 67] * 5, [120] * 4]
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "lookup": {"lookup": True, "lookup_min": 2},
    "draft": {"drafts": ["similar"], "expansion": (2, 2, 1)},
    "both": {"drafts": ["similar", "stranger"], "lookup": True, "expansion": (2, 1, 1)},
}
BOOLEAN = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 23]}},
            "required": ["yes", "n"],
            "additionalProperties": False,
        },
    },
}
IN_PART = {  # a schema that is enforced only in part
    "type": "json_schema",
    "json_schema": {
        "name": "kinds",
        "schema": {
            "type": "object",
            "properties": {
                "a": {"enum": [0, 1]},
                "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["a"],
            "additionalProperties": False,
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"required": ["b"], "properties": {"b": {"contains": {"const": True}, "minContains": 2}}},
        },
    },
}
PARAMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature, filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"temperature": 0},
    "presence_penalty": {"presence_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 0.9, "temperature": 0},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.6},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_penalty, greedy": {"repetition_penalty": 0.8, "temperature": 0},
    "logit_bias": {"logit_bias": {97: 4.0, 98: 3.5, 64: -100}},
    "bad_words": {"bad_words": ["a", "xx", "Axe", "b "], "logit_bias": {120: 6.0, 97: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [97, 98, 99, 120, EOS]},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS: 6.0}},
    "stop_token_ids": {"min_tokens": 4, "stop_token_ids": list(range(64, 96)), "ignore_eos": True},
    "choice": {"choice": ["yes", "yesterday", "no", "abcabcabc"]},
    "regex": {"regex": "[0-9]{1,2}(ab|cd)[xyz]"},
    "json_schema": {"response_format": BOOLEAN, "max_tokens": 60},
    "json_schema in part": {"response_format": IN_PART, "max_tokens": 60},
    "json_whitespace": {"response_format": IN_PART, "json_whitespace": "none", "max_tokens": 60},
    "choice, greedy, penalties": {"choice": ["aab", "bba"], "temperature": 0, "frequency_penalty": 2.0},
    "all of them": {
        **{"temperature": 0.9, "top_k": 40, "top_p": 0.97, "min_p": 0.001, "presence_penalty": 0.3},
        **{"frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {97: 2.0}},
        **{"bad_words": ["ab", "c"], "allowed_token_ids": [*range(32, 128), EOS], "min_tokens": 3},
    },
}


class Oracle:
    """The target alone, and the rules of parameters for its tokens."""

    def __init__(self, tiny: Tiny) -> None:
        self._alone = PlainTarget(tiny.target)
        self._compiler = GrammarCompiler(tiny.tokenizer, VOCAB)
        self._texts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self.row: Callable[[tuple[int, ...]], list[float]] = cache(
            lambda text: [float(x) for x in self._alone.logits_after(text)]
        )

    def rules(self, prompt: list[int], params: SamplingParams) -> Rules:
        return Rules(
            params,
            tuple(prompt),
            ending=(*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))),
            bad_words=tuple(tuple(word.lstrip().encode()) for word in params.bad_words),
            form=self._form(params),
        )

    def text(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Return the output's tokens, cached; None is last after a dead end."""
        key = (*prompt, repr(params))
        if key not in self._texts:
            rules, seed = self.rules(prompt, params), params.seed or 0
            rows = seeded_text(lambda out: self.row((*prompt, *out)), rules, seed, params.max_tokens)
            self._texts[key] = tuple(rows)
        return list(self._texts[key])

    def _form(self, params: SamplingParams) -> Callable[[tuple[int, ...]], set[int]] | None:
        if params.structured_output is None:
            return None
        if params.choice is not None:
            return _one_of(params.choice)
        if params.regex == PARAMS["regex"]["regex"]:
            numbers = [f"{i}" for i in range(100)] + [f"0{i}" for i in range(10)]
            return _one_of("".join(parts) for parts in product(numbers, ["ab", "cd"], "xyz"))
        # The grammar library itself for JSON, but with a new state per text: no path, no rollback, no cache.
        grammar = self._compiler.compile(params.structured_output)

        def after(output: tuple[int, ...]) -> set[int]:
            state = grammar.state()
            state.commit(output)
            return set(np.flatnonzero(state.allowed()).tolist())

        return cache(after)


def _one_of(texts: Any) -> Callable[[tuple[int, ...]], set[int]]:
    whole = [(*text.encode(), EOS) for text in texts]
    return cache(lambda out: {w[len(out)] for w in whole if w[: len(out)] == out != w})


def params_of(name: str, **more: Any) -> SamplingParams:
    """Return the parameters called `name`, updated by `more`, for a short text of a fixed seed."""
    return SamplingParams(**{"max_tokens": LENGTH, "seed": 3, **PARAMS[name], **more})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the outputs' tokens in the oracle's format."""
    failed = FinishReason.ERROR
    return [[*o.token_ids, *([None] if o.finish_reason is failed else [])] for o in outputs]  # type: ignore[list-item]
