"""Files and headers of the page at /."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

# No resources of other hosts, no inline code and no frames: a model's answer must not run as code.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # so that a newer server shows its newer page
    }
)
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    media_type: str


@cache
def page_files() -> MappingProxyType[str, PageFile]:
    """Return the files of the page by path: `/` is the page, /page/NAME and /page/vendor/NAME the others."""
    files = {}
    page = resources.files("specinfer.serve").joinpath("page")
    for folder, prefix in ((page, "/page/"), (page.joinpath("vendor"), "/page/vendor/")):
        for entry in (entry for entry in folder.iterdir() if entry.is_file()):
            path = "/" if entry.name == "index.html" else prefix + entry.name
            files[path] = PageFile(entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
    return MappingProxyType(files)
