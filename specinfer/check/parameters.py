"""Checks that texts are the same with and without speculation under every sampling parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specinfer.check.difference import PlainTarget, Verdict
from specinfer.check.identity import compare_texts
from specinfer.check.promise import Effort, check_bookkeeping, engine_like, with_verifier
from specinfer.engine.admission import Admission
from specinfer.errors import RequestError
from specinfer.llm import LLM
from specinfer.progress import NoProgress, Progress
from specinfer.request import Request, RequestOutput
from specinfer.sampling_params import SamplingParams, SpeculationParams
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculation_config import NO_SPECULATION, SpeculationConfig
from specinfer.tokenizer import Tokenizer

MIN_TOKENS: Final = 40  # output tokens under the setting min_tokens; the min of max_tokens
TEMPERATURE: Final = 0.8  # unless a setting has its own
# An engine without speculators still proposes tokens that a grammar forces.
OFF: Final = SpeculationParams(enabled=False)
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 60},
        "certain": {"type": "boolean"},
        "sources": {"type": "array", "items": {"enum": ["book", "web", "memory"]}, "maxItems": 2},
    },
    "required": ["answer", "certain", "sources"],
    "additionalProperties": False,
}
_BIASES: Final = {" of": -100.0, " a": -2.0, " you": 1.5, "\n": 1.0}
_COMMON_WORDS: Final = ("the", "and", "is", "important", "such as", "a variety of", "it's")

Setting = Mapping[str, Any]  # sampling parameters of its requests, without seed and length


def settings_for(tokenizer: Tokenizer, vocab: int) -> dict[str, Setting]:
    """Return the settings by name; `vocab` is the target's number of logits."""
    ascii_only = [t for t in range(min(vocab, tokenizer.vocab_size)) if tokenizer.token_bytes[t].isascii()]
    plain_ids = sorted({*ascii_only, *tokenizer.eos_token_ids})
    biased = {tokenizer.encode(text, add_special=False)[0]: bias for text, bias in _BIASES.items()}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}
    return {
        "seed": {"temperature": 1.0},
        "temperature 0": {"temperature": 0},
        "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
        "presence_penalty": {"presence_penalty": 1.0},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "repetition_penalty, greedy": {"repetition_penalty": 1.2, "temperature": 0},
        "logit_bias": {"logit_bias": biased},
        "bad_words": {"bad_words": _COMMON_WORDS},
        "allowed_token_ids": {"allowed_token_ids": plain_ids},
        "min_tokens": {"min_tokens": MIN_TOKENS, "stop": (".",)},
        "regex": {"regex": r"(Yes|No|Perhaps), because [a-z ,']{20,120}\."},
        "choice": {"choice": ["Yes, certainly.", "Yes, but it depends.", "No, never.", "No, not any more."]},
        "json_schema": {"response_format": schema},
        "all of them": {
            "top_k": 100,
            "top_p": 0.95,
            "min_p": 0.01,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.05,
            "logit_bias": biased,
            "bad_words": _COMMON_WORDS,
            "allowed_token_ids": plain_ids,
            "min_tokens": 20,
        },
    }


def params_of(setting: Setting, requests: int, max_tokens: int) -> list[SamplingParams]:
    """Return the parameters of a number of requests, with seeds 0, 1, ...."""
    usual = {"temperature": TEMPERATURE, "max_tokens": max_tokens}
    return [SamplingParams(**{**usual, "seed": seed, **setting}) for seed in range(1, requests + 1)]


class ProcessedTarget(PlainTarget):
    """The target with one request's logit processors, for comparing its choices."""

    def __init__(self, llm: LLM, params: SamplingParams, prompt: Sequence[int]) -> None:
        super().__init__(llm.models.target, llm.models.adapters)
        self._request = Request("judged", tuple(prompt), params, 0)  # processors do not use the seed
        context = llm.max_context
        self._admission = Admission(
            llm.tokenizer,
            SpeculationLimits(SpeculationConfig(), ()),
            vocab=llm.models.target.config.vocab_size,
            max_context=context,
            capacity=context,
        )

    def logits_after(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Return the processed logits after a text that begins with the prompt, [vocab]."""
        processors = self._admission.processors(self._request)
        processors.commit(text[len(self._request.prompt_token_ids) :])
        return processors.apply(super().logits_after(text), ())


def check_parameters(
    llm: LLM, prompts: Sequence[Sequence[int]], effort: Effort, progress: Progress | None = None
) -> Iterator[Verdict]:
    """Yield a verdict per setting: seeded texts with speculation equal those without.

    `llm` is the speculating engine, `prompts` its token ids; `effort.max_tokens` is at least MIN_TOKENS. The
    verifier is the coupled one, which preserves texts, and trees have their full size.
    """
    progress = progress or NoProgress()
    plain = engine_like(llm, NO_SPECULATION, prompts, effort)
    speculative = engine_like(llm, with_verifier(llm.config.speculation, "coupled"), prompts, effort)
    target = PlainTarget(llm.models.target, llm.models.adapters)
    for name, setting in settings_for(llm.tokenizer, llm.models.target.config.vocab_size).items():
        each = params_of(setting, len(prompts), effort.max_tokens)

        def count(output: RequestOutput) -> None:
            progress.advance(int(output.finished))

        try:
            without = [replace(params, speculation=OFF) for params in each]
            with progress.showing(2 * len(prompts), name, "texts"):
                expected = plain.generate(prompts, without, on_output=count)
                got = speculative.generate(prompts, each, on_output=count)
        except RequestError as error:  # a model without end-of-text tokens has no grammars
            yield Verdict(name, False, f"refused: {error}", decided=False)
            continue
        judge = partial(ProcessedTarget, llm, each[0])
        yield compare_texts(name, target, each[0], expected, got, judge)
    yield check_bookkeeping([plain, speculative])
