"""Long answers: the time of rendering grows with the answer, and trees are drawn on demand."""

import pytest

from tests.scripted_server import says_in_steps, steps_of
from tests.unit.serve.page.asking import Page, Serving, ask

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("marking")]
WORDS = 2000
TEXT = "\n\n".join(" ".join(f"word{i}" for i in range(at, at + 50)) for at in range(0, WORDS, 50))

WATCH = """() => {
    window.changes = { added: 0, trees: 0 };
    new MutationObserver((records) => {
        for (const { addedNodes } of records) {
            for (const one of addedNodes) {
                if (one.nodeType !== 1) continue;
                changes.added += one.querySelectorAll(".token").length;
                changes.trees += one.className === "tree";
            }
        }
    }).observe(document.body, { childList: true, subtree: true });
}"""
# Milliseconds that each text takes while it arrives in pieces of 20 characters, each rendered at once.
GROWING = """async (texts) => {
    const { Prose } = await import("/page/prose.js");
    return texts.map((text) => {
        const marking = () => ({ on: false, inCode: false });
        const prose = new Prose(document.createElement("div"), marking, () => {});
        const began = performance.now();
        for (let at = 0; at < text.length; at += 20) {
            prose.append(text.slice(at, at + 20), null);
            prose.finish();
        }
        return performance.now() - began;
    });
}"""


def test_many_tokens_are_rendered_in_blocks_and_no_tree_unasked(page: Page, opened: Serving) -> None:
    opened(says_in_steps(TEXT, nodes=64))
    page.evaluate(WATCH)
    ask(page, "Count.")
    steps = len(list(steps_of(TEXT)))
    assert page.locator(".answer .token").count() == WORDS
    changes = page.evaluate("changes")
    # A block of 50 words is rendered again as it grows; all 2000 words never are.
    assert changes["added"] <= 50 * WORDS, changes
    assert changes["trees"] == 0
    assert page.locator(".answer .strip g").count() == steps
    # The page scrolls with the text.
    at, end = page.evaluate("(main => [main.scrollTop + main.clientHeight, main.scrollHeight])(window.main)")
    assert at >= end - 2
    page.locator(".answer .token").nth(WORDS - 5).click()
    assert page.locator("#inspector .tree .node").count() == 65
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("changes.trees") == 2
    assert page.locator("#inspector .tree .node").count() == 65
    before = page.evaluate("document.querySelectorAll('*').length")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.querySelectorAll('*').length") < before + 64


def test_the_time_of_a_growing_answer_is_not_quadratic(page: Page, opened: Serving) -> None:
    opened(says_in_steps("unused"))
    paragraph = "A paragraph of *some* words, with `code` and a [link](https://a.example).\n\n"
    warm, short, long = page.evaluate(GROWING, [paragraph * 100, paragraph * 100, paragraph * 800])
    assert long < 3 * 8 * short, f"{short:.0f} ms, and {long:.0f} ms for 8 times the text (first {warm:.0f})"
