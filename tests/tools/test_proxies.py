"""The files of proxies in deploy/, each run in front of a server."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
HOST = {"Host": "llm.example.org"}


class Upstream(BaseHTTPRequestHandler):
    """Streams an event, and the second one when the client has read the first."""

    protocol_version = "HTTP/1.1"
    read = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        names = f"{self.headers['Host']} {self.headers['X-Forwarded-For']}"
        for text in (f"data: {names}\n\n".encode(), b"data: end\n\n", b""):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
            self.wfile.flush()
            assert self.read.wait(30)

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", str(len(str(size))))
        self.end_headers()
        self.wfile.write(str(size).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def configured(name: str, folder: Path, port: int, upstream: int) -> list[str]:
    """Write the file for these ports, without TLS and with short timeouts; returns the proxy's command."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
    file = folder / name
    if name == "Caddyfile":
        text = text.replace("llm.example.org {", f"http://llm.example.org:{port} {{")
        text = text.replace("{\n", "{\n\tadmin off\n", 1).replace("read_header 10s", "read_header 1s")
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]
    else:
        text = re.sub(r"\n *ssl_certificate.*", "", text.replace("443 ssl", f"127.0.0.1:{port}"))
        text = text.replace("client_header_timeout 10s", "client_header_timeout 1s")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        process = f"pid {folder}/pid; daemon off; master_process off; events {{}}"
        text = f"{process}\nhttp {{ access_log off; {folders}\n{text}}}\n"
        command = ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(file)]
    file.write_text(text, encoding="utf-8")
    return command


@contextmanager
def running(name: str, folder: Path) -> Iterator[int]:
    """Run the proxy; yields its port."""
    with socket.socket() as free, ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as upstream:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        command = configured(name, folder, port, upstream.server_address[1])
        free.close()
        with subprocess.Popen(
            command, env={"HOME": str(folder), "PATH": "/bin"}, executable=shutil.which(command[0])
        ) as proxy:
            try:
                for _ in range(300):
                    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.1)
                yield port
            finally:
                proxy.terminate()
                upstream.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_a_proxy_streams_and_bounds_its_clients(name: str, tmp_path: Path) -> None:
    program = {"nginx.conf": "nginx", "Caddyfile": "caddy"}[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    Upstream.read.clear()
    with running(name, tmp_path) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx.stream("GET", f"{url}/v1/models", headers=HOST, timeout=20) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: llm.example.org 127.0.0.1"  # before the server sends the next
            Upstream.read.set()
            assert "data: end" in list(lines)
        too_large = 413 if program == "nginx" else 200  # behind Caddy the server itself refuses it
        for size, status in ((15 << 20, 200), (17 << 20, too_large)):
            posted = httpx.post(f"{url}/v1/completions", content=b"x" * size, headers=HOST, timeout=20)
            assert posted.status_code == status
        assert httpx.get(f"{url}/metrics", headers=HOST).status_code == 403
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: llm.exam")
            assert b"200" not in slow.recv(1000)  # closed, perhaps with a 408


def test_the_files_name_options_of_the_server() -> None:
    from specinfer.cli.serve import serve

    options = {option for parameter in serve.params for option in parameter.opts}
    for name in ("nginx.conf", "Caddyfile"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        assert set(re.findall(r"--[a-z-]+", text)) <= options, name
        assert text.count("{") == text.count("}"), name
