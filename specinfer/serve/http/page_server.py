"""Files and headers of the page at /, and TraceServer, which shows a trace file on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote, urlsplit

from specinfer.errors import ConfigError
from specinfer.serve.http.hosts import Hosts

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

_HOST: Final = "127.0.0.1"
_HOSTS: Final = Hosts((_HOST,))  # with any port, which may be forwarded
_TRACE: Final = "/trace.jsonl"  # path that the page reads


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


class TraceServer(ThreadingHTTPServer):
    """Serves the page and `trace`, the text of a trace file, on the loopback interface.

    Port 0 takes any free port. Raises ConfigError if the port is taken.
    """

    daemon_threads = True

    def __init__(self, trace: bytes, name: str, port: int = 0) -> None:
        self.files = {**page_files(), _TRACE: PageFile(trace, "application/jsonl; charset=utf-8")}
        self._name = name
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "allowed: 0 to 65535"
            raise ConfigError(f"cannot listen on {_HOST}:{port}: {reason}; give another --port") from None

    @property
    def authority(self) -> str:
        """Host and port of the server."""
        return f"{_HOST}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """Address of the page, with the name of the trace."""
        return f"http://{self.authority}/?trace={quote(self._name)}"

    def handle_error(self, request: Any, client_address: object) -> None:
        """Ignore browsers that disconnect."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: TraceServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not _HOSTS.admit(self.headers.get("Host", "").encode("latin-1")):
            self._answer(403, b"open the address that this server printed\n")
            return
        file = self.server.files.get(urlsplit(self.path).path)
        if file is None:
            self._answer(404, b"not found\n")
        else:
            self._answer(200, file.body, file.media_type)

    def _answer(self, status: int, body: bytes, media_type: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in {**PAGE_HEADERS, "Content-Type": media_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal is the user's."""
