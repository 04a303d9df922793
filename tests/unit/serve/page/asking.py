"""Questions on the page, and what the engine got of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.scripted_server import ScriptedServer

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route
else:  # playwright may be missing, and then no test of the page runs
    Page = Route = Any

Serving = Callable[..., ScriptedServer]
TEXT = "The fox ran over the hill, and the dog, which was old, stayed where it was: under the tree."
DONE = ".answer[aria-busy=false]"


def send(page: Page, words: str) -> None:
    page.fill("#words", words)
    page.keyboard.press("Enter")


def ask(page: Page, words: str, answers: int = 1) -> None:
    """Send a message and wait until this many answers are complete."""
    send(page, words)
    page.wait_for_selector(f"{DONE} >> nth={answers - 1}")
    page.wait_for_selector("#send:visible")


def prompts(server: ScriptedServer) -> list[str]:
    return [bytes(work.prompt_token_ids).decode() for work in server.backend.works]
