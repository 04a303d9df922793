"""Files of the page: paths, headers and access."""

import hashlib
import re
import tomllib
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import ScriptedBackend, scripted_app
from tools.vendor_page import VENDORED

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "specinfer/serve/page"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir() if path.is_file()}
LIBRARIES = {f"vendor/{path.name}": path.read_bytes() for path in (FOLDER / "vendor").iterdir()}


def client(tokenizer: Tokenizer, *keys: str, page: bool = True, root_path: str = "") -> TestClient:
    app = scripted_app(tokenizer, ScriptedBackend(), keys=keys, page=page, root_path=root_path)
    return TestClient(app, root_path=root_path)


def test_every_file_is_served_as_it_lies_there_and_to_be_run_as_nothing_else(tokenizer: Tokenizer) -> None:
    asked = client(tokenizer)
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name, source in {name: text.encode() for name, text in SOURCES.items()}.items() | LIBRARIES.items():
        answer = asked.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200, name
        assert answer.content == source
        kind = kinds.get(name.rpartition(".")[2], "text/plain")
        given = answer.headers["content-type"].removesuffix("; charset=utf-8")
        assert given.replace("application/javascript", "text/javascript") == kind, name  # by Python's table
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("img-src") == "'self' data:"
        assert {value for part, value in policy.items() if part.endswith("-src")} == {"'none'", "'self'"}
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    for rest in ("", "/", "/none.js", "/vendor", "/../app.py", "/%2e%2e/app.py"):
        assert asked.get(f"/page{rest}").status_code == 404, rest


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_the_page_needs_no_key_but_its_requests_do(tokenizer: Tokenizer, root_path: str) -> None:
    asked = client(tokenizer, "sesame", root_path=root_path)
    for path, status in {"/": 200, "/page/main.js": 200, "/page/none.js": 404, "/v1/models": 401}.items():
        assert asked.get(root_path + path).status_code == status, path


def test_the_page_can_be_left_out(tokenizer: Tokenizer) -> None:
    asked = client(tokenizer, page=False)
    assert asked.get("/").status_code == asked.get("/page/main.js").status_code == 404


def test_the_model_card_has_the_speculation_options(tokenizer: Tokenizer) -> None:
    [card] = client(tokenizer).get("/v1/models").json()["data"]
    options = {"max_nodes": 64, "expansion": "learned", "verifier": "coupled"}
    assert card["speculation"] == {"speculators": ["grammar", "prediction", "draft", "lookup"], **options}


def test_the_page_names_its_own_files_and_no_other_host() -> None:
    named = set()
    for name, source in SOURCES.items():
        assert source.isascii(), name
        hosts = set(re.findall(r"https?://[^\s\"'`)]+", source)) - {"http://www.w3.org/2000/svg"}
        assert hosts == set(), f"{name} names {hosts}"
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b", source), name
        named |= set(re.findall(r'(?:from|import) "\./([\w./]+)"', source))
    html = SOURCES["index.html"]
    named |= set(re.findall(r'(?:href|src)="page/([\w.]+)"', html))
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?! type=\"module\" src=)", html)
    licences = {name for name in LIBRARIES if name.endswith(".license.txt")}
    assert named | {"index.html"} | licences == SOURCES.keys() | LIBRARIES.keys()


def test_each_file_is_one_noun_and_short() -> None:
    assert {name for name, source in SOURCES.items() if len(source.splitlines()) > 300} == set()


def test_the_package_has_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["specinfer"]
    assert {"serve/page/*", "serve/page/vendor/*"} <= set(data)


def test_the_libraries_are_those_that_npm_has_and_each_has_its_licence() -> None:
    """`tools/vendor_page.py` fetches them; a change by hand fails here."""
    pinned = {f"vendor/{one.name}": one.sha256 for one in VENDORED}
    assert pinned == {name: hashlib.sha256(body).hexdigest() for name, body in LIBRARIES.items()}
    packages = {one.package for one in VENDORED}
    assert packages == {one.package for one in VENDORED if one.name.endswith(".license.txt")}
