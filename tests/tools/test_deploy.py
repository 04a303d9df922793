"""The steps of the Dockerfile as a script: the installation serves and passes its own check."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from specinfer.cli.serve import serve
from specinfer.kernels.build import find_compiler
from specinfer.serve.config import ServeConfig
from tests.served import Served
from tests.tiny_models import write_tiny_llama
from tests.tools.sources import bare_environment, copying_compiler

pytestmark = pytest.mark.thorough

REPOSITORY: Final = Path(__file__).parents[2]
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
    ignored = shutil.ignore_patterns(
        ".venv", ".git", "__pycache__", "*.egg-info", ".mypy_cache", "build", "dist"
    )
    shutil.copytree(REPOSITORY, context, ignore=ignored)
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
    given = {
        "100": ["0"],  # restarts
        "specinfer": [sys.executable, "-m", "specinfer"],
        "/etc/specinfer/key": [str(tmp_path / "none")],
    }
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
    assert [one["kind"] for one in (deployment, *others)] == [
        "Deployment",
        "PersistentVolumeClaim",
        "Service",
    ]
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/health",
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert all(probe["port"] in ports for probe in probes.values())
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
