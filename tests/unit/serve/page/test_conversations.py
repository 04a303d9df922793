"""Conversations: kept in the browser, continued and regenerated, and usable after refusals and cuts."""

import json
import re
from pathlib import Path

import pytest

from specinfer.request import Delta, FinishReason
from specinfer.serve.http.api_error import ApiError
from tests.scripted_server import says, says_in_steps, steps_of
from tests.unit.serve.page.asking import DONE, TEXT, Page, Route, Serving, ask, prompts, send

pytestmark = pytest.mark.thorough
BEGUN = "".join(text for text, _ in list(steps_of(TEXT))[:3])
GONE = "The server does not answer; start it, or try again."


def press(page: Page, name: str, **more: bool) -> None:
    page.get_by_role("button", name=name, **more).last.click()


def shown(page: Page) -> list[str]:
    """Texts of the messages and answers."""
    return page.locator("#messages :is(.words, .content > .tokens)").all_inner_texts()


def titles(page: Page) -> list[str]:
    return page.locator("#list a").all_inner_texts()


def test_conversations_are_kept_renamed_exported_deleted(page: Page, opened: Serving, tmp_path: Path) -> None:
    server = opened(says_in_steps("It is **one**."), says_in_steps("Two."), says_in_steps("Three."))
    ask(page, "First?")
    figures = page.locator(".numbers").inner_text()
    press(page, "New chat")
    assert (shown(page), page.locator("#welcome").is_visible()) == ([], True)
    ask(page, "Second?")
    assert titles(page) == ["Second?", "First?"]
    page.get_by_role("link", name="First?").click()
    page.get_by_text("It is one.").wait_for()
    page.reload()
    page.get_by_text("It is one.").wait_for()
    assert shown(page) == ["First?", "It is one."]
    assert page.locator(".numbers").inner_text() == figures
    assert page.locator("#list [aria-current]").inner_text() == "First?"
    ask(page, "And?", 2)
    assert prompts(server)[1:] == [
        "user: Second?\nassistant: ",
        "user: First?\nassistant: It is **one**.\nuser: And?\nassistant: ",
    ]
    assert titles(page) == ["First?", "Second?"]

    # By the keyboard alone.
    page.get_by_role("button", name="More for First?").press("Enter")
    page.keyboard.press("Enter")
    page.keyboard.type("Of numbers")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Of numbers").wait_for()
    assert page.evaluate("document.activeElement.ariaLabel") == "More for Of numbers"
    assert page.title() == "Of numbers - specinfer"
    files = {}
    for downs in (1, 2):
        page.keyboard.press("Enter")
        for _ in range(downs):
            page.keyboard.press("ArrowDown")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        files[path.name] = path.read_text()
        page.get_by_role("button", name="More for Of numbers").focus()
    assert files["of-numbers.md"] == (
        "# Of numbers\n\n## You\n\nFirst?\n\n## scripted\n\nIt is **one**.\n\n"
        "## You\n\nAnd?\n\n## scripted\n\nThree.\n"
    )
    exported = json.loads(files["of-numbers.json"])
    assert [turn["role"] for turn in exported["turns"]] == ["user", "assistant"] * 2
    for answer, left in (("Cancel", ["Of numbers", "Second?"]), ("Delete", ["Second?"])):
        page.get_by_role("button", name="More for Of numbers").press("Enter")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        page.get_by_role("dialog").get_by_role("button", name=answer).press("Enter")
        page.locator("#list a").nth(len(left)).wait_for(state="detached")
        assert titles(page) == left
    assert (shown(page), page.url) == ([], server.url + "/")
    page.reload()
    page.get_by_role("link", name="Second?").click()
    page.get_by_text("Two.").wait_for()
    page.go_back()
    page.wait_for_selector("#welcome:visible")


def test_a_draft_with_its_files_survives_a_reload(page: Page, opened: Serving, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_bytes(b"# Notes\r\n```\ncode\n```\n")
    other = tmp_path / "other.bin"
    other.write_bytes(b"\xff\xfe\x00")
    server = opened(says_in_steps("Yes."))
    page.fill("#words", "What is in it?")
    page.set_input_files("#attachments", [notes])
    page.locator("#files", has_text="notes.md").wait_for()
    page.reload()
    assert page.input_value("#words") == "What is in it?"
    assert page.locator("#files").inner_text() == "notes.md21 B\u00d7"
    page.set_input_files("#attachments", [other])
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == "other.bin is not text in UTF-8; attach a text file."
    ask(page, "What is in it?")
    [prompt] = prompts(server)
    assert prompt == "user: notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nWhat is in it?\nassistant: "
    assert page.locator(".user .file-name").inner_text() == "notes.md"
    page.fill("#words", "of this one")
    press(page, "New chat")
    assert page.input_value("#words") == ""
    page.go_back()
    page.get_by_text("Yes.").wait_for()
    assert page.input_value("#words") == "of this one"
    page.evaluate(
        """() => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File(["1,2"], "dropped.csv"));
            const how = { dataTransfer, bubbles: true, cancelable: true };
            document.body.dispatchEvent(new DragEvent("drop", how));
        }"""
    )
    page.get_by_role("button", name="Remove dropped.csv").click()
    assert page.locator("#files").inner_text() == ""


def test_a_refused_prompt_goes_back_to_the_input(page: Page, opened: Serving, complaints: list[str]) -> None:
    refusal = ApiError("the prompt is too long; shorten it", param="messages")
    ended = Delta("", finish_reason=FinishReason.ERROR, error="no token is left")
    server = opened([refusal], says_in_steps("One."), [refusal], [ended], [refusal], says_in_steps("Two."))
    alert = page.get_by_role("alert")

    def refused(said: str, words: str, texts: list[str]) -> None:
        alert.wait_for()
        assert alert.inner_text() == f"The server refused the request: {said}"
        assert (page.input_value("#words"), shown(page)) == (words, texts)
        page.locator("#send").wait_for()
        page.fill("#words", "")

    send(page, "Long")
    refused("the prompt is too long; shorten it", "Long", [])
    assert (page.url, titles(page)) == (server.url + "/", [])
    ask(page, "First?")
    assert alert.count() == 0
    for said in ("the prompt is too long; shorten it", "no token is left"):
        send(page, "Longer")
        refused(said, "Longer", ["First?", "One."])
    page.locator(".user").hover()
    press(page, "Edit")
    page.get_by_label("Your message").fill("Edited")
    page.locator(".edit").get_by_role("button", name="Send").click()
    refused("the prompt is too long; shorten it", "Edited", ["First?", "One."])
    ask(page, "Second?", 2)
    assert prompts(server)[-1] == "user: First?\nassistant: One.\nuser: Second?\nassistant: "
    assert all("400" in one for one in complaints)
    complaints.clear()


def test_one_sentence_says_that_it_is_gone(page: Page, opened: Serving, complaints: list[str]) -> None:
    opened(says_in_steps("One."), says_in_steps("Two."))
    ask(page, "First?")
    page.context.set_offline(True)
    send(page, "Second?")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert alert.inner_text() == GONE
    assert (page.input_value("#words"), shown(page)) == ("Second?", ["First?", "One."])
    page.context.set_offline(False)
    alert.wait_for(state="hidden")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{DONE} >> nth=1")
    assert shown(page) == ["First?", "One.", "Second?", "Two."]
    assert all("ERR_INTERNET_DISCONNECTED" in one for one in complaints)
    complaints.clear()


def test_an_answer_has_versions_and_the_shown_one_is_sent(page: Page, opened: Serving) -> None:
    server = opened(*[says_in_steps(f"It is {one}.") for one in ("one", "two", "three", "four")])
    ask(page, "Which?")
    assert page.get_by_role("group", name="Versions").count() == 0
    for _ in range(2):
        press(page, "Regenerate")
        page.wait_for_selector("#send:visible")
    assert shown(page) == ["Which?", "It is three."]
    versions = page.get_by_role("group", name="Versions")
    assert versions.inner_text().split() == ["\u2039", "3", "/", "3", "\u203a"]
    assert page.get_by_role("button", name="Next version").is_disabled()
    press(page, "Previous version")
    assert page.get_by_role("status").inner_text() == "Version 2 of 3"
    assert page.evaluate("document.activeElement.ariaLabel") == "Previous version"
    page.reload()
    page.get_by_text("It is two.").wait_for()
    press(page, "Previous version")
    press(page, "Next version")
    ask(page, "Sure?", 2)
    begun = "user: Which?\nassistant: "
    assert prompts(server) == [*[begun] * 3, begun + "It is two.\nuser: Sure?\nassistant: "]
    assert page.get_by_role("button", name="Regenerate").count() == 1  # of the last answer alone


def test_an_answer_goes_on_where_it_was_stopped_met_its_limit_or_was_cut(page: Page, opened: Serving) -> None:
    limited = says("Once", reason=FinishReason.LENGTH)
    stopped = says_in_steps(TEXT, stops_after=3)
    server = opened(stopped, limited, stopped, says_in_steps(" And more."))
    send(page, "Go on.")
    page.get_by_text(BEGUN.strip()).wait_for()
    press(page, "Stop")
    page.get_by_text("You stopped the answer.").wait_for()
    press(page, "Continue")
    page.get_by_text("The answer met its limit of tokens.").wait_for()
    assert shown(page) == ["Go on.", BEGUN + "Once"]
    press(page, "Continue")
    page.get_by_text(BEGUN + "Once" + BEGUN.strip()).wait_for()
    page.wait_for_function(  # it is stored once in a second
        """text => new Promise(done => indexedDB.open("specinfer").onsuccess = ({ target }) => {
            const all = target.result.transaction("conversations").objectStore("conversations").getAll();
            all.onsuccess = () => done(all.result[0]?.turns[1].versions[0].text === text);
        })""",
        arg=BEGUN + "Once",
    )
    page.reload()
    page.get_by_text("The page was closed before the answer was complete.").wait_for()
    begun = page.locator(".prose").inner_text()
    assert begun.startswith(BEGUN + "Once")
    press(page, "Continue")
    page.get_by_text("And more.").wait_for()
    page.wait_for_selector(DONE)
    assert shown(page) == ["Go on.", f"{begun} And more."]
    assert page.get_by_role("button", name="Continue").count() == 0
    continued = [f"user: Go on.\nassistant: {text}" for text in (BEGUN, BEGUN + "Once", begun)]
    assert prompts(server)[1:] == continued


def test_a_stream_that_was_cut_says_so_and_goes_on(page: Page, opened: Serving) -> None:
    opened(says_in_steps(" of it."))
    asked = []

    def cut(route: Route) -> None:
        asked.append(route.request.post_data_json)
        if len(asked) > 2:
            return route.continue_()
        name = ("reasoning_content", "content")[len(asked) - 1]
        chunk = {"choices": [{"index": 0, "delta": {name: ("I think", "The end")[len(asked) - 1]}}]}
        body = f"data: {json.dumps(chunk)}\n\n"
        return route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", cut)
    ask(page, "Tell.")
    end = page.locator(".end")
    assert end.inner_text() == "The connection to the server was lost before the answer was complete."
    for _ in range(2):
        press(page, "Continue")
        page.wait_for_selector("#send:visible")
    assert shown(page) == ["Tell.", "The end of it."]
    end.wait_for(state="hidden")
    begun = [body["messages"][-1] for body in asked]
    assert begun[1:] == [
        {"role": "assistant", "content": "<think>\nI think"},
        {"role": "assistant", "content": "The end", "reasoning_content": "I think"},
    ]
    assert [body.get("continue_final_message") for body in asked] == [None, True, True]


def test_only_what_the_user_sets_is_sent(page: Page, opened: Serving) -> None:
    opened(says_in_steps("Yes."))
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "Well?")
    assert set(request.value.post_data_json) == {"model", "messages", "stream", "stream_options", "trace"}
    cards = {"data": [{"id": "m", "sampling_defaults": {"temperature": 0.3, "top_k": 20}}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=cards))
    page.reload()
    page.wait_for_selector("#model option[value=m]", state="attached")
    for name, usual in {"temperature": "0.3", "top_k": "20", "top_p": "1", "min_p": "0"}.items():
        assert page.get_attribute(f"[name={name}]", "placeholder") == usual
        assert page.input_value(f"[name={name}]") == ""


def test_a_conversation_that_is_left_is_stopped_and_kept(page: Page, opened: Serving) -> None:
    server = opened(says_in_steps(TEXT, stops_after=3), says_in_steps("Second."))
    send(page, "First?")
    page.get_by_text(BEGUN.strip()).wait_for()
    press(page, "New chat")
    page.locator("#send").wait_for()
    ask(page, "Second?")
    assert server.backend.gone == [server.backend.works[0].id]
    page.get_by_role("link", name="First?").click()
    page.get_by_text("You stopped the answer.").wait_for()
    assert shown(page) == ["First?", BEGUN.strip()]
    page.get_by_role("button", name="More for First?").click()
    press(page, "Delete", exact=False)
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.locator("#list a").nth(1).wait_for(state="detached")
    assert re.search("specinfer$", page.title())


def test_without_a_database_conversations_are_kept_until_the_page_closes(page: Page, opened: Serving) -> None:
    page.add_init_script("indexedDB.open = () => { throw new DOMException('denied', 'SecurityError'); }")
    opened(says_in_steps("One."), says_in_steps("Two."))
    ask(page, "First?")
    press(page, "New chat")
    ask(page, "Second?")
    assert titles(page) == ["Second?", "First?"]
    page.get_by_role("link", name="First?").click()
    page.get_by_text("One.").wait_for()
