"""Thinking ends at its budget, exactly, whatever guesses are accepted around its end; a byte is a token."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from specinfer import SamplingParams
from specinfer.processors.pipeline import Processors
from specinfer.processors.thinking import ThinkingState
from specinfer.sampling_params import ThinkingBudget
from tests.engines import Tiny, tiny_of

VOCAB, END = 128, 5
TIGHT = {0x3E: -100.0}  # the model itself never closes
FORM = {"regex": "(ab|cd)x[0-9]{3}", "preamble": "preamble: close\nclose[lazy]: /(?s:.*)>>/"}


def budget(tokens: int, **more: Any) -> ThinkingBudget:
    return ThinkingBudget(tokens=tokens, open="<<", close=">>", ending=tuple(b">>"), **more)


tiny = tiny_of(vocab_size=VOCAB, max_context=96, eos_token_id=END)


def test_the_place_at_which_thinking_has_to_end() -> None:
    for bound, text, required in (
        (budget(0), "", None),
        (budget(0), " \n<<", ">"),
        (budget(0), " \n<<>", ">"),
        (budget(0), "a<<", None),  # not at the start
        (budget(0, repeats=True), "a<<", ">"),
        (budget(2), "<<ab", ">"),
        (budget(2), "<<a", None),
        (budget(2), "<<ab>>", None),
        (budget(2), "<<ab>><<", None),
        (budget(2, repeats=True), "<<ab>>c<<", ">"),
        (budget(2, repeats=True), "<<>>c<<ab", ">"),
        (budget(0, started=True), "", ">"),
        (budget(3, started=True), ">>abc", None),  # it ended by itself
        (budget(3, started=True), "a>b", ">"),
    ):
        for cut in range(len(text) + 1):
            thinking = ThinkingState(bound, lambda token: bytes([token]))
            thinking.commit(text[:cut].encode())
            assert thinking.required(text[cut:].encode()) == (required and ord(required)), (bound, text, cut)


def test_a_used_budget_bars_what_would_begin_thinking_again() -> None:
    bars = budget(2, repeats=True, head="<", barred=(0x3C,))
    for bound, text, barred in (
        (bars, "<<ab>>c<", True),
        (bars, "<<ab>>c", False),
        (bars, "<<ab<", False),  # it ends
        (bars, "<<>>c<", False),  # there is budget left
        (replace(bars, tokens=0), "c<", True),
        (budget(2, repeats=True), "<<ab>>c<", False),
    ):
        for cut in range(len(text) + 1):
            thinking = ThinkingState(bound, lambda token: bytes([token]))
            thinking.commit(text[:cut].encode())
            path = text[cut:].encode()
            assert thinking.barred(path) == ((0x3C,) if barred else ()), (text, cut)
            pipeline = Processors(SamplingParams(), (), vocab=VOCAB, ending=(), thinking=thinking)
            logits = pipeline.apply(np.zeros(VOCAB, np.float32), path)
            assert pipeline.permits(path, 0x3C) == np.isfinite(logits[0x3C]), (text, cut)
            assert not barred or (logits == 0).sum() == VOCAB - 1


def test_texts_are_the_same_with_speculation_and_their_forms_hold_behind_the_end(tiny: Tiny) -> None:
    for tokens, more in ((0, FORM), (7, FORM), (7, {}), (60, FORM)):
        for seed, temperature in ((1, 0.0), (2, 1.0), (3, 1.0)):
            plain = SamplingParams(
                temperature=temperature,
                seed=seed,
                max_tokens=24,
                logit_bias=TIGHT,
                thinking=budget(tokens, started=True),
                speculation={"enabled": False},  # type: ignore[arg-type]
                **more,  # type: ignore[arg-type]
            )
            with tiny.llm() as llm:
                [alone] = llm.generate("abc", plain)
            text = bytes(alone.token_ids).rstrip(b"\5").decode()
            assert text.find(">>") == (tokens if tokens < 24 else -1), text
            assert tokens == 60 or not more or re.fullmatch(FORM["regex"], text.partition(">>")[2]), text
            # The whole text is guessed: thinking, its end and what follows are accepted in one step.
            guessed = replace(plain, speculation=True, prediction=alone.token_ids)  # type: ignore[arg-type]
            with tiny.llm(["similar"], lookup=True) as llm:
                both = llm.generate(["abc", "abc"], [guessed, replace(guessed, prediction=None)])
            assert [one.token_ids for one in both] == [alone.token_ids] * 2, (tokens, seed)
            assert both[0].figures.steps < len(alone.token_ids) / 2
