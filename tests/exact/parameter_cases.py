"""Sampling parameters over four tokens, and what they mean to the slow oracle and to the engine."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from specinfer.processors.pipeline import Processors
from specinfer.processors.thinking import ThinkingState
from specinfer.sampling_params import SamplingParams, ThinkingBudget

from .slow_sampling import Rules

VOCAB = 4
END = 3
PROMPT = (0, 1, 1)
NAMES = ("a", "b", "<|bos|>", "<|im_end|>")  # texts of the tokens; the last two are special


class WordList:
    """A form over token ids: the output is one of these words, then the end. Stands in for GrammarState."""

    def __init__(self, words):
        self.words = words
        self.output = ()

    def allowed(self, path=()):
        possible = words_after(self.words, (*self.output, *path))
        return np.array([token in possible for token in range(VOCAB)])

    def permits(self, path, token):
        return bool(self.allowed(path)[token])

    def commit(self, tokens):
        self.output += tuple(tokens)


def words_after(words, output):
    return {(*one, END)[len(output)] for one in words if (*one, END)[: len(output)] == output != (*one, END)}


def forced_after(budget, output):
    """The token that must follow: "a" opens thinking, and "<|bos|>" or the budget's ending closes it."""
    used, thinks = 0, budget.started
    left = list(budget.ending) if thinks and not budget.tokens else []  # the rest of the ending
    for index, token in enumerate(output):
        if left:
            left = left[1:]
            thinks = bool(left)
        elif thinks:
            thinks, used = token != 2, used + (token != 2)
        else:
            thinks = NAMES[token] == "a" and (index == 0 or budget.repeats)
        if thinks and not left and used >= budget.tokens:
            left = list(budget.ending)
    return left[0] if left else None


@dataclass(frozen=True)
class Case:
    """Parameters, and what they mean over token ids."""

    params: SamplingParams
    ending: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    words: tuple[tuple[int, ...], ...] | None = None

    @property
    def rules(self):
        form = None if self.words is None else partial(words_after, self.words)
        thinking = None if self.params.thinking is None else partial(forced_after, self.params.thinking)
        return Rules(self.params, PROMPT, self.ending, self.bad_words, form, thinking, NAMES)

    def processors(self, output):
        made = Processors(
            self.params,
            PROMPT,
            vocab=VOCAB,
            ending=self.ending,
            bad_words=self.bad_words,
            grammar=None if self.words is None else WordList(self.words),
            thinking=self.params.thinking
            and ThinkingState(self.params.thinking, lambda one: NAMES[one].encode()),
        )
        for token in output:
            made.commit([token])
        return made


def case(ending=(), bad_words=(), words=None, **params):
    return Case(SamplingParams(**params), ending, bad_words, words)


def thinking(tokens, ending=(2,), **more):
    return ThinkingBudget(tokens=tokens, open="a", close=NAMES[2], ending=ending, **more)


WORDS = ((0, 1), (0, 1, 2), (2,), (1, 1, 0), (1, 2, 2))
CASES = {
    "nothing": case(),
    "ending": case(ending=(END,)),
    "presence_penalty": case(presence_penalty=1.5),
    "frequency_penalty": case(frequency_penalty=1.1),
    "negative penalties": case(presence_penalty=-0.7, frequency_penalty=-1.3),
    "repetition_penalty": case(repetition_penalty=1.7),
    "repetition_penalty < 1": case(repetition_penalty=0.6),
    "logit_bias": case(logit_bias={0: 1.3, 2: -100.0}),
    "bad_words": case(bad_words=((1,), (0, 0), (2, 0, 2))),
    "allowed_token_ids": case(allowed_token_ids=(0, 2, END), ending=(END,)),
    "min_tokens": case(min_tokens=2, ending=(END,)),
    "min_tokens, two endings": case(min_tokens=1, ending=(1, END)),
    "structured output": case(words=WORDS, ending=(END,)),
    "structured output, min_tokens": case(words=WORDS, ending=(END,), min_tokens=2),
    "a dead end in mid-text": case(words=WORDS, ending=(END,), min_tokens=3),
    "thinking": case(thinking=thinking(1), ending=(END,)),
    "thinking, no tokens": case(thinking=thinking(0, (1, 2), started=True), ending=(END,)),
    "thinking again": case(thinking=thinking(1, repeats=True), top_k=3),
    "thinking, structured output": case(
        words=((0, 0, 2, 1), (0, 1, 2), (0, 2, 2), (1, 1)), thinking=thinking(1), ending=(END,)
    ),
    "greedy": case(temperature=0, frequency_penalty=1.1, bad_words=((0, 0), (2, 1)), ending=(END,)),
    "stops with special names": case(stop=("<|bos|>b", "<|bos|>a<|b", "ba", NAMES[END]), min_tokens=2),
    "greedy, such a stop": case(temperature=0, frequency_penalty=1.7, stop=("b<|bos|>",)),
    "all of them": case(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={1: 0.7},
        bad_words=((0, 0), (2, 1)),
        allowed_token_ids=(0, 1, 2, END),
        min_tokens=2,
        ending=(END,),
    ),
}
