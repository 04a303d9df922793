"""Alignment of texts and tokens, and the layout of trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.scripted_server import says_in_steps
from tests.unit.serve.page.asking import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


def content(*parts: tuple[str, str | None]) -> list[list[str | None]]:
    return [[text, token, "content"] for text, token in parts]


@pytest.mark.parametrize(
    ("received", "placed"),
    [
        pytest.param(
            [("tokens", [["A"], [" cat"]]), ("content", "A cat")],
            content(("A", "A"), (" cat", " cat")),
            id="as it is",
        ),
        pytest.param(
            [("tokens", [[" A"], [" cat"]]), ("content", "A cat")],
            content(("A", " A"), (" cat", " cat")),
            id="the first space is left out",
        ),
        pytest.param(
            [("tokens", [["A"], ["<|end|>"], [" cat"], ["<|end|>"]]), ("content", "A cat"), ("skip", None)],
            content(("A", "A"), (" cat", " cat")),
            id="special tokens are hidden",
        ),
        pytest.param(
            [
                ("tokens", [["A"], [" cat"]]),
                ("content", "A"),
                ("tokens", [[" sat"]]),
                ("content", " cat sat"),
            ],
            content(("A", "A"), (" cat", " cat"), (" sat", " sat")),
            id="the text lags, as it may be a stop string",
        ),
        pytest.param(
            [("tokens", [["A"], [" catalogue"]]), ("content", "A cat"), ("skip", None)],
            content(("A", "A"), (" cat", " catalogue")),
            id="a stop string cuts a token",
        ),
        pytest.param(
            [
                ("tokens", [["A"], [" \ufffd", [0x20, *FACE[:2]]]]),
                ("content", "A"),
                ("tokens", [["\ufffd", FACE[2:]], ["!"]]),
                ("content", " \U0001f600!"),
            ],
            content(("A", "A"), (" \U0001f600", " \ufffd"), ("!", "!")),
            id="a character lies in two tokens",
        ),
        pytest.param(
            [
                ("tokens", [["\ufffd", FACE[:2]], ["!"]]),
                ("content", "\ufffd!"),
            ],
            content(("\ufffd", "\ufffd"), ("!", "!")),
            id="a character that never becomes whole",
        ),
        pytest.param(
            [("tokens", [["A"]]), ("content", "Otherwise")],
            content(("Otherwise", None)),
            id="no token explains it",
        ),
        pytest.param(
            [("content", "A cat")],
            content(("A cat", None)),
            id="no trees at all",
        ),
        pytest.param(
            [
                ("tokens", [["<think>"], ["\n"], ["so"], ["\n"], ["</think>"], [" Yes"], ["."]]),
                ("reasoning", "so"),
                ("content", "Yes"),
                ("content", "."),
            ],
            [["so", "so", "reasoning"], ["Yes", " Yes", "content"], [".", ".", "content"]],
            id="reasoning comes first",
        ),
    ],
)
def test_each_part_of_a_text_finds_its_token(
    page: Page, serving: Serving, received: list[tuple[str, Any]], placed: list[list[str | None]]
) -> None:
    page.goto(serving(says_in_steps("unused")).url)
    assert page.evaluate(PLACED, [list(one) for one in received]) == placed


LAID_OUT = """async ([parents, path]) => {
    const { layout } = await import("/page/tree_layout.js");
    const { Step } = await import("/page/step.js");
    const ids = parents.map((_, node) => node);
    const names = parents.map((_, node) => node ? ["draft"] : []);
    const step = new Step({ step: 1, token_ids: ids, parents, path, next_token: 99, proposed_by: names });
    const { places } = layout(step, () => 10, { gap: 2, pitch: 1 });
    return places.map(({ token, depth, row }) => [token.node ?? "own", depth, row]);
}"""


@pytest.mark.parametrize(
    ("parents", "path", "places"),
    [
        pytest.param([-1], [], [[0, 0, 0], ["own", 1, 0]], id="no guesses"),
        pytest.param([-1, 0, 1], [1], [[0, 0, 0], [1, 1, 0], ["own", 2, 0], [2, 2, 1]], id="a chain"),
        pytest.param(
            # 0 -- 1 -- 2 -- own     the path, straight
            # |    `-- 4             beside 2
            # `-- 3 -- 5             below both, as it is as deep as 4
            [-1, 0, 1, 0, 1, 3],
            [1, 2],
            [[0, 0, 0], [1, 1, 0], [2, 2, 0], ["own", 3, 0], [4, 2, 1], [3, 1, 2], [5, 2, 2]],
            id="branches",
        ),
        pytest.param(
            # 0 -- 1 -- 2 -- own
            # |         `-- 4     deep
            # `-- 3               shallow, so it stands in the same row
            [-1, 0, 1, 0, 2],
            [1, 2],
            [[0, 0, 0], [1, 1, 0], [2, 2, 0], ["own", 3, 0], [4, 3, 1], [3, 1, 1]],
            id="short branches share a row",
        ),
    ],
)
def test_a_tree_is_laid_out_left_to_right(
    page: Page, serving: Serving, parents: list[int], path: list[int], places: list[list[Any]]
) -> None:
    page.goto(serving(says_in_steps("unused")).url)
    assert page.evaluate(LAID_OUT, [parents, path]) == places
