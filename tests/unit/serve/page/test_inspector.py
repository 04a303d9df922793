"""The tree inspector, by mouse and by keyboard."""

from typing import Any

import pytest

from tests.scripted_server import says_in_steps, steps_of
from tests.unit.serve.page.asking import DONE, TEXT, Page, Serving, ask, send

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("marking")]
NODES = 9
STEPS: list[dict[str, Any]] = [tree for _, tree in steps_of(TEXT, nodes=NODES)]


@pytest.fixture
def answered(page: Page, opened: Serving) -> Page:
    """A page with an answer."""
    opened(says_in_steps(TEXT, nodes=NODES))
    ask(page, "Tell me of the fox.")
    return page


def title(page: Page) -> str:
    return page.locator("#inspector h2").inner_text()


def nodes(page: Page, kind: str) -> list[str]:
    return [plain(text) for text in page.locator(f"#inspector .node.{kind} .text").all_inner_texts()]


def plain(shown: str) -> str:
    """A node's text with its spaces as spaces."""
    return shown.replace("\u00b7", " ")


def texts_of(tree: dict[str, Any]) -> list[str]:
    """The words of a step."""
    return [text.strip() for text in [*(tree["texts"][node] for node in tree["path"]), tree["next_text"]]]


def lit(page: Page) -> list[str]:
    return page.locator(".answer .token.current").all_inner_texts()


def test_a_click_on_a_word_shows_the_tree_of_its_step(answered: Page) -> None:
    answered.locator(".answer .token", has_text="over").click()
    [number] = [i for i, tree in enumerate(STEPS) if " over" in [*tree["texts"][1:], tree["next_text"]]]
    tree = STEPS[number]
    path = [tree["texts"][node] for node in tree["path"]]
    assert title(answered) == f"Step {number + 1} of {len(STEPS)}"
    assert nodes(answered, "root") == [tree["texts"][0]]
    assert nodes(answered, "accepted") == path
    assert nodes(answered, "own") == [tree["next_text"]]
    rejected = [text for node, text in enumerate(tree["texts"]) if node and node not in tree["path"]]
    assert sorted(nodes(answered, "rejected")) == sorted(rejected)
    assert lit(answered) == texts_of(tree)
    description = answered.locator("#inspector .tree li").filter(has_text=path[0].strip()).first.inner_text()
    assert f'" {path[0].strip()}", guessed by' in description
    assert "90% likely, accepted" in description
    assert '"The", the last token of the text before this step' in description
    assert '" the", added by the target' in description
    cost = answered.get_by_role("region", name="Cost of the step").inner_text()
    assert "25 ms" in cost
    assert [line for line in cost.splitlines() if line.endswith("ms")][-3:] == ["4.0 ms", "20 ms", "1.0 ms"]
    assert f"{len(path)} of {NODES - 1} guesses accepted" in answered.locator(".summary").inner_text()


def test_the_kinds_of_boxes_are_explained(answered: Page) -> None:
    answered.locator(".answer .token", has_text="over").click()
    kinds = answered.locator("#inspector .kind").all_inner_texts()
    assert kinds == ["accepted", "rejected", "added by the target"]


def test_the_tree_is_nested_as_it_grew(answered: Page) -> None:
    answered.locator(".answer .token", has_text="over").click()
    parents = answered.eval_on_selector_all(
        "#inspector .tree li",
        """items => items.map(item => {
            const text = (one) => one?.querySelector(':scope > .node .text').textContent ?? null;
            return [text(item), text(item.parentElement.closest('li'))];
        })""",
    )
    tree = next(tree for tree in STEPS if " over" in tree["texts"][1:])
    texts, last = tree["texts"], [0, *tree["path"]][-1]
    expected: dict[str, str | None] = {texts[0]: None, tree["next_text"]: texts[last]}
    expected |= {texts[node]: texts[parent] for node, parent in enumerate(tree["parents"]) if node}
    assert {plain(text): parent and plain(parent) for text, parent in parents} == expected


def test_every_step_is_reached_by_the_keyboard_alone(answered: Page) -> None:
    answered.get_by_role("button", name="Inspect steps").focus()
    answered.keyboard.press("Enter")
    assert title(answered) == f"Step 2 of {len(STEPS)}"
    seen = [lit(answered)]
    for _ in range(len(STEPS) - 2):
        answered.keyboard.press("ArrowRight")
        seen.append(lit(answered))
    assert seen == [texts_of(tree) for tree in STEPS[1:]]
    answered.keyboard.press("ArrowRight")
    assert title(answered) == f"Step {len(STEPS)} of {len(STEPS)}"
    assert answered.get_by_role("button", name="Next step").is_disabled()
    answered.keyboard.press("Home")
    assert title(answered) == f"Step 1 of {len(STEPS)}"
    answered.keyboard.press("End")
    assert f"Step {len(STEPS)}: " in answered.get_by_role("status").inner_text()
    answered.keyboard.press("Escape")
    answered.locator("#inspector").wait_for(state="hidden")
    assert answered.evaluate("document.activeElement.textContent") == "Inspect steps"
    assert lit(answered) == []


def test_arrows_go_from_word_to_word_and_enter_opens_its_step(answered: Page) -> None:
    answered.get_by_role("group", name="Answer").focus()
    for _ in range(3):
        answered.keyboard.press("ArrowRight")
    assert answered.locator(".token.at").inner_text() == "over"
    note = answered.get_by_role("tooltip").inner_text()
    assert "step 2, token 3 of 4" in note
    assert answered.get_by_role("status").inner_text().startswith("over: guessed by ")
    answered.keyboard.press("Enter")
    assert title(answered) == f"Step 2 of {len(STEPS)}"
    answered.keyboard.press("Escape")
    assert answered.evaluate("document.activeElement.className") == "tokens prose"


def test_hovering_shows_the_source_of_a_token(answered: Page) -> None:
    answered.locator(".answer .token").first.hover()
    shown = answered.get_by_role("tooltip").inner_text().splitlines()
    assert shown == ["The", "added by the target", "step 1, token 1 of 1"]
    answered.mouse.move(5, 5)
    assert answered.get_by_role("tooltip").count() == 0


def test_the_inspector_marks_its_step_where_the_marks_are_off(answered: Page) -> None:
    answered.get_by_role("switch", name="Guesses").uncheck()
    assert answered.locator(".answer .token").count() == 0
    answered.get_by_role("button", name="Inspect steps").click()
    assert lit(answered) == texts_of(STEPS[1])
    assert "none" in answered.locator(".token").first.evaluate("one => getComputedStyle(one).textDecoration")
    answered.keyboard.press("Escape")
    assert answered.locator(".answer .token").count() == 0


def test_steps_are_played_and_held(answered: Page) -> None:
    answered.clock.install()
    answered.get_by_role("button", name="Inspect steps").click()
    answered.keyboard.press("Space")
    answered.get_by_role("button", name="Pause").wait_for()
    later = sum(len(tree["path"]) + 1 for tree in STEPS[2:])
    assert answered.locator(".token.later").count() == later
    answered.clock.run_for(1500)
    assert title(answered) == f"Step 4 of {len(STEPS)}"
    answered.keyboard.press("Space")
    answered.clock.run_for(3000)
    assert title(answered) == f"Step 4 of {len(STEPS)}"
    assert answered.locator(".token.later").count() == 0
    answered.keyboard.press("Space")
    answered.clock.run_for(60_000)
    assert title(answered) == f"Step {len(STEPS)} of {len(STEPS)}"
    answered.get_by_role("button", name="Play").wait_for()


def test_the_chart_of_steps_is_a_slider_and_takes_clicks(answered: Page) -> None:
    answered.locator(".answer .strip g").nth(4).locator("rect").first.click()
    assert title(answered) == f"Step 5 of {len(STEPS)}"
    slider = answered.get_by_role("slider", name="Step")
    assert slider.get_attribute("aria-valuenow") == "5"
    accepted = len(STEPS[4]["path"])
    counts = f"{accepted} of {NODES - 1} guesses accepted, {accepted + 1} tokens"
    assert slider.get_attribute("aria-valuetext") == f"Step 5 of {len(STEPS)}: {counts}"
    slider.focus()
    answered.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuenow") == "4"
    answered.locator("#inspector .strip g").nth(1).locator("rect").first.click()
    assert slider.get_attribute("aria-valuenow") == "2"


def test_an_answer_that_still_grows_can_be_inspected(page: Page, opened: Serving) -> None:
    opened(says_in_steps(TEXT, nodes=NODES, stops_after=3), says_in_steps("Done."))
    send(page, "Tell me of the fox.")
    page.locator(".answer .token").nth(1).click()
    page.get_by_role("heading", name="Step 2 of 3").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(DONE)
    assert lit(page) != []
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#inspector").wait_for(state="hidden")
    page.wait_for_selector(DONE)
