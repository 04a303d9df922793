"""Long answers: work per update is constant, and trees are drawn on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.scripted_server import ScriptedServer, says_in_steps, steps_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.thorough
Serving = Callable[..., ScriptedServer]
WORDS = 2000
TEXT = " ".join(f"word{i}" for i in range(WORDS))

WATCH = """() => {
    window.changes = { added: 0, removed: 0, trees: 0 };
    new MutationObserver((records) => {
        for (const { addedNodes, removedNodes } of records) {
            changes.added += [...addedNodes].filter(one => one.className?.includes?.("token ")).length;
            changes.removed += [...removedNodes].filter(one => one.nodeType === 1).length;
            changes.trees += [...addedNodes].filter(one => one.className === "tree").length;
        }
    }).observe(document.body, { childList: true, subtree: true });
}"""


def test_two_thousand_tokens_are_added_one_by_one_and_no_tree_is_drawn_unasked(
    page: Page, serving: Serving
) -> None:
    page.goto(serving(says_in_steps(TEXT, nodes=64)).url)
    page.evaluate(WATCH)
    page.get_by_role("textbox", name="Message").fill("Count.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer[aria-busy=false]", timeout=60_000)
    steps = len(list(steps_of(TEXT)))
    assert page.locator(".answer .token").count() == WORDS
    assert page.evaluate("changes") == {"added": WORDS, "removed": 0, "trees": 0}
    assert page.locator(".answer .strip g").count() == steps
    # The page scrolls with the text.
    at, end = page.evaluate("(main => [main.scrollTop + main.clientHeight, main.scrollHeight])(window.main)")
    assert at >= end - 2
    page.locator(".answer .token").nth(WORDS - 5).click()
    assert page.locator("#inspector .tree .node").count() == 65
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("[changes.added, changes.trees]") == [WORDS, 2]
    assert page.locator("#inspector .tree .node").count() == 65
    before = page.evaluate("document.querySelectorAll('*').length")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.querySelectorAll('*').length") < before + 64
