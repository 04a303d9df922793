"""The steps of the Dockerfile, run as a script: what they install serves, and is well by its own check."""

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
from typing import Final

import pytest

from specinfer.kernels.build import find_compiler
from specinfer.kernels.machine import LEVELS, architecture
from tests.served import Served
from tests.tiny_models import write_tiny_llama

REPOSITORY: Final = Path(__file__).parents[2]
DEPLOY: Final = REPOSITORY / "deploy"
NEEDS_ROOT: Final = ("apt-get ", "useradd ")


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
    [level, *_] = [one.name for one in LEVELS if one.architecture == architecture()]
    env = {**os.environ, "PATH": f"{shim}:{os.environ['PATH']}", "SPECINFER_WHEEL_LEVELS": level}
    env.pop("PYTHONPATH", None)

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


def test_the_units_command_is_understood() -> None:
    import click

    from specinfer.cli.serve import serve

    unit = (DEPLOY / "specinfer.service").read_text(encoding="utf-8")
    [command] = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    _, name, *arguments = shlex.split(command)
    assert name == "serve"
    serve.make_context(name, arguments)
    assert isinstance(serve, click.Command)
