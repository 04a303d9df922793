"""The page at / and what it is made of, as browsers get it: from the package, and from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

# Nothing from another host, nothing inline, in nobody's frame: an answer of a model is no code.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # a newer server has a newer page
    }
)
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    body: bytes
    media_type: str


@cache
def page_files() -> MappingProxyType[str, PageFile]:
    """Every file of the page by the path it is asked for: `/`, and /page/NAME for the others."""
    files = {}
    for entry in resources.files("specinfer.serve").joinpath("page").iterdir():
        path = "/" if entry.name == "index.html" else f"/page/{entry.name}"
        files[path] = PageFile(entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
    return MappingProxyType(files)
