"""Chat on the page: streaming, marks, stop, regenerate, edit and settings."""

import json
from typing import Any

import pytest

from specinfer.request import Delta, FinishReason
from tests.scripted_server import says_in_steps, steps_of
from tests.unit.serve.page.asking import DONE, TEXT, Page, Route, Serving, ask, prompts, send

pytestmark = pytest.mark.thorough


def answer_text(page: Page) -> str:
    return page.locator(".answer .tokens").last.inner_text()


def test_a_click_sends_an_example(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps(TEXT, nodes=9))
    example = page.locator("#examples button").first
    words = example.inner_text()
    example.click()
    page.wait_for_selector(DONE)
    assert prompts(server) == [f"user: {words}\nassistant: "]
    page.locator("#examples").wait_for(state="hidden")


@pytest.mark.usefixtures("marking")
def test_an_answer_is_streamed_and_tokens_are_marked_by_speculator(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps(TEXT, nodes=9))
    ask(page, "Tell me of the fox.")
    assert answer_text(page) == TEXT
    assert prompts(server) == ["user: Tell me of the fox.\nassistant: "]
    both = "all => all.map(one => [one.textContent, one.className])"
    marks = page.eval_on_selector_all(".answer .token", both)
    steps = [tree for _, tree in steps_of(TEXT, nodes=9)]
    places = {"draft": 0, "lookup": 1, "prediction": 2, "grammar": 3}
    expected = []
    for tree in steps:
        for node in tree["path"]:
            by = tree["proposed_by"][node]
            several = " by-several" if len(by) > 1 else ""
            expected.append([tree["texts"][node].strip(), f"token by-{places[by[0]]}{several}"])
        expected.append([tree["next_text"].strip(), "token by-target"])
    assert marks == expected
    tokens = sum(len(tree["path"]) + 1 for tree in steps)
    assert page.locator(".figure-rate").inner_text() == f"{(tokens - 1) / (len(steps) - 1):.2f}"
    assert page.locator(".figure-tokens").inner_text() == str(tokens)
    guessed = sum("lookup" in names for tree in steps for names in tree["proposed_by"])
    right = sum("lookup" in tree["proposed_by"][node] for tree in steps for node in tree["path"])
    assert f"{right} of {guessed}" in page.locator(".legend li", has_text="lookup").inner_text()
    assert page.locator(".answer .strip g").count() == len(steps)
    page.get_by_role("switch", name="Guesses").uncheck()
    assert page.locator(".answer .token").count() == 0
    assert answer_text(page) == TEXT


def test_an_answer_can_be_stopped(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps(TEXT, stops_after=3), says_in_steps("Again."))
    send(page, "Go on.")
    first_steps = "".join(text for text, _ in list(steps_of(TEXT))[:3])
    page.get_by_text(first_steps.strip()).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(DONE)
    page.get_by_text("You stopped the answer.").wait_for()
    assert answer_text(page) == first_steps
    assert page.evaluate("document.activeElement.id") == "words"
    ask(page, "And now?", 2)
    assert server.backend.gone == [server.backend.works[0].id]
    assert prompts(server)[1] == f"user: Go on.\nassistant: {first_steps}\nuser: And now?\nassistant: "


def test_editing_a_question_drops_the_later_turns(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps("One."), says_in_steps("Two."), says_in_steps("Three."))
    for place, words in enumerate(("First?", "Second?")):
        send(page, words)
        page.wait_for_selector(f"{DONE} >> nth={place}")
    page.get_by_role("button", name="Edit").first.click()
    box = page.get_by_label("Your message")
    assert box.input_value() == "First?"
    box.press("Escape")
    assert page.locator(".turn").count() == 4
    page.get_by_role("button", name="Edit").first.click()
    box.fill("Another?")
    page.locator(".edit").get_by_role("button", name="Send").click()
    page.get_by_role("article", name="Answer").get_by_text("Three").wait_for()
    page.wait_for_selector(DONE)
    assert page.locator(".turn").count() == 2
    assert prompts(server)[2] == "user: Another?\nassistant: "


def test_settings_go_with_the_request_and_outlive_the_page(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps("Yes."))
    page.wait_for_selector("[name=speculator]", state="attached")
    page.get_by_role("button", name="Settings").click()
    numbers = {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "7"}
    numbers |= {"max_tokens": "33", "max_nodes": "12", "expansion": "2, 2, 1"}
    for name, value in {"system": "Be brief.", "stop": "\\n\\n\nEnd", **numbers}.items():
        page.fill(f"[name={name}]", value)
    page.select_option("[name=verifier]", "mss")
    page.get_by_label("lookup", exact=True).uncheck()
    page.get_by_role("button", name="Done").click()
    page.reload()
    page.wait_for_selector("[name=speculator]", state="attached")
    ask(page, "Well?")
    assert prompts(server) == ["system: Be brief.\nuser: Well?\nassistant: "]
    params = server.backend.works[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.seed, params.max_tokens, params.stop) == (7, 33, ("\n\n", "End"))
    asked = params.speculation
    assert asked.speculators == ("grammar", "prediction", "draft")
    assert (asked.max_nodes, str(asked.expansion), asked.verifier) == (12, "2,2,1", "mss")


def test_speculation_can_be_switched_off(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps("Yes."))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Use speculation").uncheck()
    page.get_by_role("button", name="Done").click()
    ask(page, "Well?")
    assert server.backend.works[0].params.speculation.enabled is False


def test_a_setting_out_of_range_is_shown_before_anything_is_sent(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps("Yes."))
    page.get_by_role("button", name="Settings").click()
    page.fill("[name=top_p]", "7")
    page.get_by_role("button", name="Done").click()
    page.keyboard.press("Escape")
    send(page, "Well?")
    page.wait_for_selector("dialog[open] [name=top_p]:invalid")
    assert server.backend.works == []


def test_a_key_is_requested_and_kept_for_the_tab(page: Page, opened: Serving, complaints: list[str]) -> None:
    opened(says_in_steps("Welcome."), keys=["sesame"])
    page.get_by_text("The server requires an API key").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Done").click()
    page.wait_for_selector("#model option", state="attached")
    assert page.get_by_role("alert").count() == 0
    page.reload()
    ask(page, "Open.")
    assert answer_text(page) == "Welcome."
    assert page.evaluate("JSON.stringify(localStorage)").count("sesame") == 0
    assert all("401" in one for one in complaints)
    complaints.clear()


def test_an_error_in_the_middle_is_shown_below_the_text(page: Page, opened: Serving) -> None:
    refused = Delta("", finish_reason=FinishReason.ERROR, error="no token is left", parameter="seed")
    opened([Delta("", "Well", (1,)), refused])
    ask(page, "Well?")
    assert page.get_by_role("alert").inner_text() == "The server refused the request: no token is left"
    assert answer_text(page) == "Well"
    assert page.get_attribute("[name=seed]", "aria-invalid") == "true"
    page.get_by_role("button", name="Continue").wait_for()


@pytest.mark.usefixtures("marking")
def test_reasoning_is_folded_and_calls_are_shown(page: Page, opened: Serving) -> None:
    steps = [tree for _, tree in steps_of("<think> let me see </think> It is so.")]

    def chunk(delta: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, **more}]})}\n\n"

    def called(index: int, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": function}]}

    body = chunk({"role": "assistant", "content": ""}, trees=steps)
    body += chunk({"reasoning_content": "let me"}) + chunk({"reasoning_content": " see"})
    body += chunk({"content": "It is"}) + chunk({"content": " so."})
    body += chunk(called(0, name="look", arguments="")) + chunk(called(0, arguments='{"at": 1}'))
    body += chunk({}, finish_reason="tool_calls") + "data: [DONE]\n\n"

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    opened(says_in_steps("unused"))
    page.route("**/v1/chat/completions", answer)
    ask(page, "Is it?")
    fold = page.locator("details.reasoning")
    assert fold.get_attribute("open") is None
    fold.locator("summary").click()
    assert fold.locator(".token").all_inner_texts() == ["let", "me", "see"]
    assert page.locator(".content > .tokens .token").all_inner_texts() == ["It", "is", "so", "."]
    assert page.locator(".call").inner_text() == 'Tool call: look {"at": 1}'


def test_words_sent_before_the_models_are_known_wait_for_them(page: Page, opened: Serving) -> None:
    asked: list[Route] = []
    page.route("**/v1/models", lambda route: asked.append(route))
    server = opened(says_in_steps(TEXT))
    send(page, "Tell me of the fox.")
    page.keyboard.press("Enter")
    assert page.get_by_label("Message", exact=True).input_value() == "Tell me of the fox."
    assert page.locator(".answer").count() == 0
    asked[0].continue_()
    page.wait_for_selector(DONE)
    assert answer_text(page) == TEXT
    assert prompts(server) == ["user: Tell me of the fox.\nassistant: "]
