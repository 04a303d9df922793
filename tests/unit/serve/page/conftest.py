from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import Script, ScriptedServer, scripted_server
from tests.unit.serve.page.asking import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("SPECINFER_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP page.test 127.0.0.1",  # a name that is not localhost, without HTTPS
)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Iterator[Serving]:
    """Returns a function that starts a scripted server, which ends with the test."""
    with ExitStack() as stack:
        yield lambda *scripts, **given: stack.enter_context(scripted_server(tokenizer, *scripts, **given))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium for one module; skips if there is none.

    While it exists, no other test of this process can run an event loop.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is missing; set SPECINFER_CHROMIUM to another path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def marking(page: Page) -> None:
    """The page marks guessed tokens."""
    page.add_init_script("localStorage.setItem('specinfer.marks', 'on')")


@pytest.fixture
def complaints() -> list[str]:
    """Errors and warnings on the page's console; a test removes those that it expects."""
    return []


@pytest.fixture
def page(browser: Browser, complaints: list[str], serving: Serving) -> Iterator[Page]:
    """A new page; the test fails if its console has errors or if it contacts another host.

    It takes `serving` so that it closes before the test's servers end: an open page asks for their health.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    hosts: set[str] = set()
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
    yield page
    context.close()
    assert complaints == []
    assert hosts <= {"127.0.0.1", "page.test", ""}, "the page contacts other hosts"


@pytest.fixture
def opened(page: Page, serving: Serving) -> Serving:
    """Returns a function that starts a scripted server, and shows its page."""

    def start(*scripts: Script, keys: Sequence[str] = ()) -> ScriptedServer:
        server = serving(*scripts, keys=keys)
        page.goto(server.url)
        return server

    return start
