"""The site: it builds, its links lead somewhere, and its pages need no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
ASSET = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"?(https?:)?//", re.I)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("material", "mkdocstrings_handlers"):
        pytest.importorskip(needed, reason="the site is built by packages of: pip install 'specinfer[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # warns of links to nothing, and of pages out of the navigation
    return folder


def test_the_python_page_describes_fields(site: Path) -> None:
    page = (site / "python" / "index.html").read_text(encoding="utf-8")
    for field, comment in (
        ("error", "message, if finish_reason"),
        ("expansion", "widths &lt;k1,k2,...&gt; of"),
    ):
        assert f"<li><code>{field}</code>: {comment}" in page
    above = "[prompt tokens], the first is None; None unless requested."  # a comment above its field
    assert f"<li><code>prompt_logprobs</code>: {above}" in page


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loading = [page for page in site.rglob("*.html") if ASSET.search(page.read_text(encoding="utf-8"))]
    assert loading == []
