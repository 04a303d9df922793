"""The files of deploy/: the steps of the Dockerfile, proxies in front of a server, and the dashboard."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import Expr, VectorSelector

from specinfer.cli.serve import serve
from specinfer.kernels.build import find_compiler
from specinfer.serve.config import ServeConfig
from tests.served import Served
from tests.tiny_models import write_tiny_llama
from tests.tools.sources import REPOSITORY, bare_environment, copying_compiler

pytestmark = pytest.mark.thorough

DEPLOY: Final = REPOSITORY / "deploy"
NEEDS_ROOT: Final = ("apt-get ", "useradd ")
SHUTDOWN: Final = 27  # seconds after --grace: 2 to close streams, 5 for the engine, 20 for the traffic log


def steps(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, in order; continued lines are one."""
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def python_with_our_packages(folder: Path) -> Path:
    """A folder with a `python3` whose environments have what is installed here, so nothing is fetched."""
    packages = sysconfig.get_path("purelib")
    folder.mkdir()
    shim = folder / "python3"
    shim.write_text(
        "#!/bin/sh\n"
        f'"{sys.executable}" "$@" || exit\n'
        '[ "$1 $2" = "-m venv" ] || exit 0\n'
        f'for at in "$3"/lib/python*/site-packages; do echo "{packages}" > "$at/ours.pth"; done\n'
    )
    shim.chmod(0o755)
    return folder


def test_the_image_runs_as_nobody_in_particular_and_is_watched() -> None:
    said = dict(steps("Dockerfile"))
    assert said["USER"] == "specinfer"
    assert json.loads(said["ENTRYPOINT"]) == ["specinfer", "serve"]
    assert "/health" in said["HEALTHCHECK"]
    [made] = [rest for word, rest in steps("Dockerfile") if word == "RUN" and "useradd" in rest]
    assert f"install -d -o specinfer -g specinfer {said['VOLUME']}" in made  # or models could not be fetched
    for name in ("HF_HOME", "SPECINFER_CACHE"):
        assert f"{name}={said['VOLUME']}" in said["ENV"]
    order = [word for word, _ in steps("Dockerfile")]
    assert order.index("USER") < order.index("ENTRYPOINT")


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="the image's first stage has a compiler; none is here")
def test_its_steps_give_a_server(tmp_path: Path) -> None:
    root = tmp_path / "image"
    shim = python_with_our_packages(tmp_path / "bin")
    compiler = tmp_path / "bin" / "c++"
    level = copying_compiler(compiler).level.name
    path = f"{shim}:{os.environ['PATH']}"
    env = bare_environment(PATH=path, CXX=str(compiler), SPECINFER_WHEEL_LEVELS=level)

    def there(path: str) -> str:
        return str(root / path.lstrip("/"))

    context = tmp_path / "context"
    left_out = (".venv", ".git", "__pycache__", "*.egg-info", ".mypy_cache", "build", "dist")
    shutil.copytree(REPOSITORY, context, ignore=shutil.ignore_patterns(*left_out))
    for word, rest in steps("Dockerfile"):
        if word == "COPY" and not rest.startswith("--from"):
            *sources, target = shlex.split(rest)
            Path(there(target)).mkdir(parents=True, exist_ok=True)
            for source in sources:
                if source == ".":
                    shutil.copytree(context, there(target), dirs_exist_ok=True)
                else:
                    shutil.copy(context / source, there(target))
        elif word == "RUN" and not rest.startswith(NEEDS_ROOT):
            Path(there("/opt")).mkdir(parents=True, exist_ok=True)
            line = re.sub(r"(?<=\s)/(?=source|wheels|opt)", f"{root}/", rest)
            done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    model = write_tiny_llama(tmp_path / "tiny", vocab_size=256, eos_token_id=0, tokenizer=True)
    python = there("/opt/specinfer/bin/python")
    with Served(model, "--dtype", "float32", "--kv-cache-memory", "16MB", python=python) as served:
        assert served.post("/v1/completions", {"prompt": "abc", "max_tokens": 4}).status_code == 200
        command = json.loads(dict(steps("Dockerfile"))["HEALTHCHECK"].partition("CMD ")[2])
        command = [part.replace("http://127.0.0.1:8000", served.url) for part in command]
        subprocess.run([python, *command[1:]], check=True, timeout=30)


def test_torchrun_fails_when_a_rank_cannot_follow(tmp_path: Path) -> None:
    unit = (DEPLOY / "specinfer-follow.service").read_text(encoding="utf-8")
    [parts] = re.findall(r"^# Without systemd: torchrun (.*)\n# +(.*)$", unit, re.M)
    given = {"100": ["0"], "/etc/specinfer/key": [str(tmp_path / "none")]}  # restarts, and the key
    given["specinfer"] = [sys.executable, "-m", "specinfer"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # with a free port
    for word in shlex.split(" ".join(parts)):
        command += given.get(word, [word])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert f"cannot read the key in {tmp_path / 'none'}" in done.stderr
    assert re.search(r"exitcode *: 2 ", done.stderr), done.stderr
    assert done.returncode == 1


def yaml_documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def understood(arguments: list[str]) -> dict[str, Any]:
    """The options of `specinfer serve` with these arguments, which must be right."""
    context = serve.make_context("serve", arguments)
    return {name: value for name, value in context.params.items() if value not in (None, ())}


def test_kubernetes_probes_and_waits_for_answers() -> None:
    deployment, *others = yaml_documents("kubernetes.yaml")
    assert deployment["kind"] == "Deployment"
    assert [one["kind"] for one in others] == ["PersistentVolumeClaim", "Service"]
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, path in {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}.items():
        probe = container[f"{name}Probe"]["httpGet"]
        assert (probe["path"], probe["port"] in ports) == (path, True), name
    options = understood(container["args"])
    assert options["grace"] == ServeConfig().grace
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert template["spec"]["terminationGracePeriodSeconds"] >= waits + options["grace"] + SHUTDOWN
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"]) == str(ServeConfig().port)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True


def test_compose_waits_for_answers() -> None:
    [compose] = yaml_documents("compose.yaml")
    service = compose["services"]["specinfer"]
    understood(service["command"])
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert int(service["stop_grace_period"].removesuffix("s")) >= ServeConfig().grace + SHUTDOWN


def test_the_options_of_the_image_and_the_unit_exist() -> None:
    words = dict(steps("Dockerfile"))
    assert understood(json.loads(words["CMD"])) == {"host": "0.0.0.0"}
    assert words["EXPOSE"] == str(ServeConfig().port)
    unit = (DEPLOY / "specinfer.service").read_text(encoding="utf-8")
    [command] = re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.M)
    assert understood(shlex.split(command))["log_format"] == "json"


DASHBOARD: Final[dict[str, Any]] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]
VARIABLES: Final = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
TARGETS: Final = {
    f"{panel['title']}, {target['refId']}": target for panel in PANELS for target in panel["targets"]
}
BUILT_IN: Final = {"__rate_interval": "1m"}  # variables of Grafana itself
Series = dict[str, set[str]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Labels by series, of a server that has answered with accepted draft tokens."""
    model = write_tiny_llama(tmp_path_factory.mktemp("m") / "tiny", vocab_size=256, tokenizer=True)
    with Served(model, "--dtype", "float32", "--kv-cache-memory", "16MB", "--tree-size", "fixed") as served:
        request = {"prompt": "abc", "max_tokens": 24, "temperature": 0}
        text = served.post("/v1/completions", request).json()["choices"][0]["text"]
        served.post("/v1/completions", {**request, "prediction": text}).raise_for_status()
        metrics = served.get("/metrics").text
    found: Series = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def resolved(text: str) -> str:
    """The text as Grafana sends it when all models are selected."""
    values = {**BUILT_IN, **{name: one.get("allValue", "") for name, one in VARIABLES.items()}}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda name: values[name[1] or name[2]], text)


def faults(query: str, legend: str, series: Series) -> list[str]:
    """Series and labels that the server does not export; raises ValueError for invalid PromQL."""
    found: list[str] = []
    labels = {"le"}  # of the series selected so far

    def visit(node: Expr) -> None:
        if isinstance(node, VectorSelector):
            name = node.name or ""
            if name not in series:
                found.append(f"no series {name}")
            labels.update(series.get(name, ()))
            wrong = {one.name for one in node.matchers.matchers} - series.get(name, set())
            found.extend(f"no label {label} of {name}" for label in wrong)

    promql_parser.walk(promql_parser.parse(resolved(query)), visit)
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby ?\(([^)]*)\)", query))))
    assert "without" not in query
    found += [f"no label {label} in {query}" for label in sorted(grouped - labels)]
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    return found + [f"no label {label} in the result" for label in sorted(shown - grouped)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_queries_name_what_a_server_exports(target: dict[str, str], series: Series) -> None:
    assert faults(target["expr"], target["legendFormat"], series) == []


def test_variables_are_defined_and_used(series: Series) -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == {*VARIABLES, *BUILT_IN}
    [(name, label)] = re.findall(r"^label_values\((\S+), (\w+)\)$", VARIABLES["model"]["query"])
    assert label in series[name]


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
        env = {"HOME": str(folder), "PATH": "/bin"}
        with subprocess.Popen(command, env=env, executable=shutil.which(command[0])) as proxy:
            try:
                for _ in range(300):
                    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.1)
                yield port
            finally:
                proxy.terminate()
                upstream.shutdown()


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
    options = {option for parameter in serve.params for option in parameter.opts}
    for name in ("nginx.conf", "Caddyfile"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        assert set(re.findall(r"--[a-z-]+", text)) <= options, name
        assert text.count("{") == text.count("}"), name
