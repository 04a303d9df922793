"""The page in a real browser, quickly: an answer in Markdown that is streamed, copied, kept and continued."""

from specinfer.request import FinishReason
from tests.scripted_server import says
from tests.unit.serve.page.asking import DONE, Page, Serving, prompts, send

ANSWER = ("Use `all`:\n\n```py\nprint(all(", "[]))\n```\n\n| a | b |\n|---|---|\n| 1 | **2**")


def test_an_answer_is_read_copied_kept_and_continued(page: Page, serving: Serving) -> None:
    server = serving(says(*ANSWER, reason=FinishReason.LENGTH), says(" and <b>3</b> |\n"))
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(server.url)
    send(page, "How?")
    page.get_by_role("cell", name="2", exact=True).wait_for()
    page.wait_for_selector(DONE)
    copy = page.get_by_role("button", name="Copy code")
    copy.click()
    copy.filter(has_text="Copied").wait_for()  # a write that a reload ends leaves the clipboard empty
    page.reload()
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("cell", name="2 and <b>3</b>").wait_for()
    page.wait_for_selector(DONE)
    assert page.locator("pre code").inner_text() == "print(all([]))\n"
    page.focus("#words")
    page.keyboard.press("Control+V")
    assert page.input_value("#words") == "print(all([]))"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert prompts(server) == ["user: How?\nassistant: ", "user: How?\nassistant: " + "".join(ANSWER)]
