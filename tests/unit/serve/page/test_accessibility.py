"""Accessibility: screen readers, keyboard, reduced motion, small screens and dark mode."""

import re

import pytest

from tests.scripted_server import says_in_steps
from tests.unit.serve.page.asking import DONE, Page, Serving, ask, send

pytestmark = pytest.mark.thorough
TEXT = "The fox ran over the hill, and the dog stayed."


@pytest.fixture
def answered(page: Page, opened: Serving, marking: None) -> Page:
    """A page with an answer, whose first tree is shown."""
    opened(says_in_steps(TEXT))
    page.wait_for_selector("#model option", state="attached")
    ask(page, "Tell me of the fox.")
    return page


def tabbed(page: Page, count: int) -> list[str]:
    """Return names, texts or ids of the next `count` elements in tab order after the first one."""
    page.get_by_role("combobox", name="Model").focus()
    name = "one.getAttribute('aria-label') || one.textContent.trim().slice(0, 30) || one.id"
    found = []
    for _ in range(count):
        page.keyboard.press("Tab")
        found.append(page.evaluate(f"(one => {name})(document.activeElement)"))
    return found


def test_the_page_reads_well(answered: Page) -> None:
    snapshot = answered.locator("body").aria_snapshot()
    for line in (
        *("banner:", 'heading "specinfer" [level=1]', 'combobox "Model":', 'switch "Guesses"', "main:"),
        *('complementary "Conversations":', 'navigation "Page":', 'article "You":', 'article "Answer":'),
        'group "Answer. Arrow keys select a token, Enter shows its step.":',
        "paragraph: " + TEXT,
        *('button "Inspect steps"', 'button "Regenerate"', 'button "Send"', 'textbox "Message":'),
        *('complementary "Figures":', 'list "Sources of the tokens":'),
    ):
        assert f"- {line}" in snapshot, f"{line} is not in\n{snapshot}"
    # Tokens are plain text, not buttons.
    assert snapshot.count("button") < 16


def test_tab_goes_through_the_page_in_reading_order(answered: Page) -> None:
    order = tabbed(answered, 11)
    assert order[3].startswith("Answer. Arrow keys")
    assert order[:3] == ["marks", "Settings", "Edit"]
    assert order[4:8] == ["Copy", "Regenerate", "Save trace", "Inspect steps"]
    assert order[8:] == ["words", "Attach text files", "Send"]
    answered.get_by_role("button", name="New chat").focus()
    answered.keyboard.press("Tab")
    assert answered.evaluate("document.activeElement.textContent") == "Tell me of the fox."


def test_everything_that_can_be_operated_has_a_name(answered: Page) -> None:
    answered.get_by_role("button", name="Inspect steps").click()
    answered.get_by_role("button", name="Settings").click()
    nameless = answered.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex='0']")]
            .filter(one => !one.hidden && !(one.ariaLabel || one.textContent.trim() || one.labels?.length))
            .map(one => one.outerHTML)"""
    )
    assert nameless == []


def test_the_end_is_announced_once_and_no_token_is(page: Page, opened: Serving) -> None:
    opened(says_in_steps(TEXT))
    page.evaluate(
        """() => {
            window.said = [];
            const status = document.querySelector("[role=status]");
            const listen = () => said.push(status.textContent);
            const all = { childList: true, characterData: true, subtree: true };
            new MutationObserver(listen).observe(status, all);
        }"""
    )
    send(page, "Tell me of the fox.")
    page.get_by_role("status").filter(has_text="finished").wait_for(state="attached")
    page.wait_for_timeout(100)
    [announced] = page.evaluate("said")
    assert re.fullmatch(r"Answer finished: \d+ tokens, \d\.\d\d tokens per step\.", announced)
    assert page.locator(".answer").evaluate("one => one.closest('[aria-live]')") is None


def test_a_dialog_gives_the_focus_back(answered: Page) -> None:
    settings = answered.get_by_role("button", name="Settings")
    settings.focus()
    answered.keyboard.press("Enter")
    answered.get_by_role("dialog", name="Settings").wait_for()
    answered.keyboard.press("Escape")
    assert answered.evaluate("document.activeElement.id") == "open-settings"


def test_reduced_motion_is_honoured(page: Page, opened: Serving) -> None:
    moving = "document.getAnimations().length"
    opened(says_in_steps(TEXT, stops_after=2), says_in_steps(TEXT, stops_after=2))
    send(page, "Tell me of the fox.")
    page.locator(".prose", has_text="The fox").wait_for()
    assert page.evaluate(moving) == 1
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == 0
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(DONE)


WIDE = (
    "A `very_long_name_of_code_" + "x" * 80 + "` and\n\n```\n" + "wide " * 60 + "\n```\n\n"
    "|" + "a column|" * 12 + "\n" + "|-" * 12 + "|\n" + "|1" * 12 + "|\n\n\\[\n" + "x + " * 60 + "y\n\\]\n\n"
    "https://a.example/" + "path" * 40
)


def test_no_width_needs_scrolling_sideways(page: Page, opened: Serving, marking: None) -> None:
    opened(says_in_steps(WIDE))
    ask(page, "Tell me of " + "w" * 100)
    for width in (360, 768, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        for act in ("", "Inspect steps", "Close", "Settings"):
            if act:
                page.get_by_role("button", name=act, exact=True).click()
            for place in ("document.documentElement", "document.querySelector('main')"):
                wide, there = page.evaluate(f"[{place}.scrollWidth, {place}.clientWidth]")
                assert wide <= there, f"{place} is {wide} pixels wide in {there} after {act!r} at {width}"
        dialog = page.get_by_role("dialog").bounding_box()
        assert 0 <= dialog["x"] <= width - dialog["width"], width  # type: ignore[index]
        page.keyboard.press("Escape")


def test_on_a_phone_the_conversations_lie_over_the_page_and_work_with_keys(answered: Page) -> None:
    answered.set_viewport_size({"width": 360, "height": 740})
    link = answered.get_by_role("link", name="Tell me of the fox.")
    link.wait_for(state="hidden")
    toggle = answered.get_by_role("button", name="Conversations")
    assert toggle.get_attribute("aria-expanded") == "false"
    toggle.press("Enter")
    assert toggle.get_attribute("aria-expanded") == "true"
    assert answered.evaluate("document.activeElement.textContent") == "New chat"
    for name in ("Tell me of the fox.", "More for Tell me of the fox.", "Open trace"):
        answered.keyboard.press("Tab")
        focused = "document.activeElement.ariaLabel ?? document.activeElement.textContent"
        assert answered.evaluate(focused) == name
    answered.keyboard.press("Tab")
    assert answered.evaluate("document.activeElement.closest('#stage')") is None  # the page behind is inert
    link.focus()
    answered.keyboard.press("Escape")
    link.wait_for(state="hidden")
    assert answered.evaluate("document.activeElement.id") == "toggle-side"
    toggle.click()
    answered.mouse.click(340, 400)
    link.wait_for(state="hidden")
    toggle.click()
    answered.get_by_role("button", name="New chat").click()
    link.wait_for(state="hidden")
    answered.wait_for_selector("#welcome:visible")
    assert answered.evaluate("document.activeElement.id") == "words"


CONTRASTS = """() => {
    const seen = (color) => {  // any notation, as red, green and blue
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = (color) => color.slice(0, 3).map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (one) => {
        for (; one; one = one.parentElement) {
            const color = seen(getComputedStyle(one).backgroundColor);
            if (color[3] === 255) return color;
        }
        return seen(getComputedStyle(document.documentElement).backgroundColor);
    };
    const found = {};
    for (const one of document.querySelectorAll("body *")) {
        const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        if (!own || !one.checkVisibility() || one.disabled || one.closest(".visually-hidden")) continue;
        const [a, b] = [light(seen(getComputedStyle(one).color)), light(behind(one))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        found[`${one.tagName} ${one.className} ${one.textContent.slice(0, 20)}`] = ratio;
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_the_light_and_in_the_dark(answered: Page, scheme: str) -> None:
    answered.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    answered.get_by_role("button", name="Inspect steps").click()
    found = answered.evaluate(CONTRASTS)
    assert len(found) > 40
    assert {what: ratio for what, ratio in found.items() if ratio < 4.5} == {}


def test_the_appearance_can_be_chosen(answered: Page) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"
    light = answered.evaluate(paper)
    answered.get_by_role("button", name="Settings").click()
    answered.select_option("[name=appearance]", "dark")
    dark = answered.evaluate(paper)
    assert dark != light
    answered.reload()
    assert answered.evaluate(paper) == dark
    answered.emulate_media(color_scheme="dark")
    answered.get_by_role("button", name="Settings").click()
    answered.select_option("[name=appearance]", "light")
    assert answered.evaluate(paper) == light
