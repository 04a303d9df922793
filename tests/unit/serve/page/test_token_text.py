"""Alignment of texts and tokens, and the layout of trees."""

from typing import Any

import pytest

from tests.scripted_server import says_in_steps
from tests.unit.serve.page.asking import Page, Serving

pytestmark = pytest.mark.thorough

PLACED = """async (received) => {
    const { TokenText } = await import("/page/token_text.js");
    const placed = [];
    const text = new TokenText((part, token, channel) => placed.push([part, token?.text ?? null, channel]));
    for (const [kind, value] of received) {
        if (kind === "tokens") text.tokens(value.map(([text, bytes]) => ({ text, bytes: bytes ?? null })));
        else if (kind === "skip") text.skip();
        else text.text(value, kind);
    }
    return placed;
}"""
FACE = [0xF0, 0x9F, 0x98, 0x80]


def tokens(*given: str | tuple[str, list[int]]) -> tuple[str, Any]:
    return "tokens", [[one] if isinstance(one, str) else list(one) for one in given]


def said(text: str) -> tuple[str, Any]:
    return "content", text


def content(*parts: tuple[str, str | None]) -> list[list[str | None]]:
    return [[text, token, "content"] for text, token in parts]


CUT = ("skip", None)
HALVES = (" \ufffd", [0x20, *FACE[:2]]), ("\ufffd", FACE[2:])
REASONED = [["so", "so", "reasoning"], ["Yes", " Yes", "content"], [".", ".", "content"]]
REASONS = tokens("<think>", "\n", "so", "\n", "</think>", " Yes", ".")
A, CAT, DOT, END = ("A", "A"), (" cat", " cat"), ("!", "!"), "<|end|>"
HALF, NONE = ("\ufffd", FACE[:2]), ("\ufffd", "\ufffd")
PARTS: dict[str, tuple[list[tuple[str, Any]], list[list[str | None]]]] = {
    "as it is": ([tokens("A", " cat"), said("A cat")], content(A, CAT)),
    "the first space is left out": ([tokens(" A", " cat"), said("A cat")], content(("A", " A"), CAT)),
    "special tokens are hidden": ([tokens("A", END, " cat", END), said("A cat"), CUT], content(A, CAT)),
    "the text lags, as it may be a stop string": (
        [tokens("A", " cat"), said("A"), tokens(" sat"), said(" cat sat")],
        content(A, CAT, (" sat", " sat")),
    ),
    "a stop string cuts a token": (
        [tokens("A", " catalogue"), said("A cat"), CUT],
        content(A, (" cat", " catalogue")),
    ),
    "a character lies in two tokens": (
        [tokens("A", HALVES[0]), said("A"), tokens(HALVES[1], "!"), said(" \U0001f600!")],
        content(A, (" \U0001f600", " \ufffd"), DOT),
    ),
    "a character that never becomes whole": ([tokens(HALF, "!"), said("\ufffd!")], content(NONE, DOT)),
    "no token explains it": ([tokens("A"), said("Otherwise")], content(("Otherwise", None))),
    "no trees at all": ([said("A cat")], content(("A cat", None))),
    "reasoning comes first": ([REASONS, ("reasoning", "so"), said("Yes"), said(".")], REASONED),
}


def test_each_part_of_a_text_finds_its_token(page: Page, opened: Serving) -> None:
    opened(says_in_steps("unused"))
    for name, (received, placed) in PARTS.items():
        assert page.evaluate(PLACED, [list(one) for one in received]) == placed, name


LAID_OUT = """async ([parents, path]) => {
    const { layout } = await import("/page/tree_layout.js");
    const { Step } = await import("/page/step.js");
    const ids = parents.map((_, node) => node);
    const names = parents.map((_, node) => node ? ["draft"] : []);
    const step = new Step({ step: 1, token_ids: ids, parents, path, next_token: 99, proposed_by: names });
    const { places } = layout(step, () => 10, { gap: 2, pitch: 1 });
    return places.map(({ token, depth, row }) => [token.node ?? "own", depth, row]);
}"""


TREES: dict[str, tuple[list[int], list[int], list[list[Any]]]] = {
    "no guesses": ([-1], [], [[0, 0, 0], ["own", 1, 0]]),
    "a chain": ([-1, 0, 1], [1], [[0, 0, 0], [1, 1, 0], ["own", 2, 0], [2, 2, 1]]),
    "branches": (
        # 0 -- 1 -- 2 -- own     the path, straight
        # |    `-- 4             beside 2
        # `-- 3 -- 5             below both, as it is as deep as 4
        [-1, 0, 1, 0, 1, 3],
        [1, 2],
        [[0, 0, 0], [1, 1, 0], [2, 2, 0], ["own", 3, 0], [4, 2, 1], [3, 1, 2], [5, 2, 2]],
    ),
    "short branches share a row": (
        # 0 -- 1 -- 2 -- own
        # |         `-- 4     deep
        # `-- 3               shallow, so it stands in the same row
        [-1, 0, 1, 0, 2],
        [1, 2],
        [[0, 0, 0], [1, 1, 0], [2, 2, 0], ["own", 3, 0], [4, 3, 1], [3, 1, 1]],
    ),
}


def test_a_tree_is_laid_out_left_to_right(page: Page, opened: Serving) -> None:
    opened(says_in_steps("unused"))
    for name, (parents, path, places) in TREES.items():
        assert page.evaluate(LAID_OUT, [parents, path]) == places, name
