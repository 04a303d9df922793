"""Trace files on the page: opened from disk and saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_server import says_in_steps, steps_of
from tests.unit.serve.page.asking import Page, Serving, ask

pytestmark = pytest.mark.thorough
TEXT = "The fox ran over the hill, and the dog stayed."


def trace(text: str, request: str = "0", **more: Any) -> str:
    events = [tree | {"request_id": request} | more for _, tree in steps_of(text)]
    return "".join(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def view(page: Page, serving: Serving, tmp_path: Path) -> Callable[[str], None]:
    """Opens a trace on the page of a server."""

    def opened(text: str) -> None:
        file = tmp_path / "of the fox.jsonl"
        file.write_text(text)
        page.goto(serving(says_in_steps("unused")).url, wait_until="networkidle")  # it listens to #file then
        page.set_input_files("#file", file)

    return opened


def test_a_trace_is_shown_with_its_first_tree(page: Page, view: Callable[[str], None]) -> None:
    view(trace(TEXT))
    page.wait_for_selector("#inspector h2")
    assert page.locator(".answer .tokens").inner_text() == TEXT
    assert page.locator("#trace-name").inner_text() == "of the fox.jsonl"
    steps = len(list(steps_of(TEXT)))
    assert page.locator("#trace-size").inner_text() == f"1 answer, {steps} steps"
    assert page.locator("#inspector h2").inner_text() == f"Step 2 of {steps}"
    assert page.locator(".figure-speed").inner_text() == "25.1"  # ms per step, as the trace says
    page.get_by_role("textbox", name="Message").wait_for(state="hidden")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Appearance").wait_for()


def test_why_so_much_was_guessed_is_shown_if_it_is_said(page: Page, view: Callable[[str], None]) -> None:
    turns = [
        {"name": "lookup", "reason": "guessed", "drawn": 7, "verified": 3, "levels": 7},
        {"name": "draft", "reason": "not worth its cost", "drawn": 0, "verified": 0, "levels": 0},
    ]
    view(trace(TEXT, decision={"speculators": turns, "expected_tokens": 2.188}))
    reasons = page.get_by_text("2.19 tokens expected; lookup: 3 of 7 verified; draft: not worth its cost")
    reasons.wait_for()
    view(trace(TEXT, decision={"speculators": turns, "expected_tokens": None}))
    page.get_by_text("lookup: 3 of 7 verified; draft: not worth its cost", exact=True).wait_for()


def test_answers_of_requests_stand_one_below_the_other(page: Page, view: Callable[[str], None]) -> None:
    lines = [trace("One. Yes.", "a").splitlines(), trace("Two. No.", "b").splitlines()]
    mixed = [line for pair in zip(*lines, strict=False) for line in pair]
    view("\n".join([*mixed, *lines[0][len(mixed) // 2 :]]) + "\n")
    page.wait_for_selector("#inspector h2")
    assert page.locator(".answer .tokens").all_inner_texts() == ["One. Yes.", "Two. No."]
    assert page.locator(".who").all_inner_texts() == ["Answer 1", "Answer 2"]


def test_a_trace_without_texts_shows_ids_or_characters(page: Page, view: Callable[[str], None]) -> None:
    face = "\U0001f600".encode()
    event: dict[str, Any] = {"step": 1, "token_ids": [5, 6], "parents": [-1, 0], "path": [1], "next_token": 7}
    event["proposed_by"] = [[], ["lookup"]]
    view(json.dumps(event))
    page.wait_for_selector("#inspector h2")
    assert page.locator(".answer .tokens").inner_text().strip() == "#6 #7"
    texts = {"texts": ["a", "\ufffd"], "next_text": "\ufffd"}
    view(json.dumps(event | texts | {"bytes": {"6": face[:2].hex(), "7": face[2:].hex()}}))
    page.wait_for_selector("#inspector h2")
    assert page.locator(".answer .tokens").inner_text() == "\U0001f600"


def test_a_file_is_opened_unless_it_is_no_trace(page: Page, serving: Serving, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(trace(TEXT))
    bad.write_text(trace(TEXT) + '{"step": 1}\n')
    page.goto(serving(says_in_steps("unused")).url, wait_until="networkidle")  # it listens to #file then
    page.set_input_files("#file", bad)
    steps = len(list(steps_of(TEXT)))
    message = f"bad.jsonl cannot be shown. Line {steps + 1}: token_ids must be a list of integers."
    assert page.get_by_role("alert").inner_text() == message
    page.set_input_files("#file", good)
    assert page.locator("#trace .answer .tokens").inner_text() == TEXT
    assert page.get_by_role("alert").count() == 0
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Back to the chat").click()
    assert page.evaluate("document.activeElement.id") == "words"


def test_the_page_saves_valid_traces(page: Page, opened: Serving, tmp_path: Path) -> None:
    opened(says_in_steps(TEXT))
    ask(page, "Tell me of the fox.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    events = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    assert events == [tree for _, tree in steps_of(TEXT)]
