"""One client at work on a server: its script as a process, and what came of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.served import Served

_LONGEST: Final = 900.0  # seconds of one script
# Clients find nothing but the server: no hub, no telemetry, no proxy that would let them out.
_OFFLINE: Final = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    "AIDER_ANALYTICS": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
# Of the machine's own environment; a key or an address of a model that is set there is nobody's here.
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing a client did."""

    title: str
    passed: bool
    note: str  # why it failed


@dataclass(frozen=True, slots=True)
class Visit:
    """What a client did, and what the server saw of it."""

    checks: Sequence[Check]
    requests: int
    refused: int  # of them, on purpose

    @property
    def passed(self) -> bool:
        """Whether the client did all of its work."""
        return all(check.passed for check in self.checks)


def visit(command: Sequence[str], home: Path, server: Served, variables: Mapping[str, str]) -> Visit:
    """Run a client's script with a home of its own below `home`, where its output stays as log.txt."""
    shutil.rmtree(home, ignore_errors=True)  # a cache of the last visit would answer for the server
    home.mkdir(parents=True)
    report = home / "report.jsonl"
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = {**kept, **_OFFLINE, **variables, "HOME": str(home), "ZOO_REPORT": str(report)}
    begun = _mark(server)
    with (home / "log.txt").open("w", encoding="utf-8") as log:
        ending = _run(command, home, environment, log)
    lines = [json.loads(line) for line in report.read_text("utf-8").splitlines()] if report.exists() else []
    plain = {line.get("plain") for line in lines}  # what scripts asked without their client, to compare
    seen = [line for line in _requests(server.log[begun : _mark(server)]) if line["request_id"] not in plain]
    checks = [Check(line["check"], line["passed"], line["note"]) for line in lines if "check" in line]
    if ending or not checks:
        checks.append(Check("the script runs to its end", False, ending or "it checked nothing"))
    refused = [line for line in seen if line["status"] >= 400]
    meant = sum(line.get("refused", 0) for line in lines)
    told = ", ".join(f"{line['method']} {line['path']} {line['status']}" for line in refused)
    if len(refused) != meant:
        note = f"{meant} were meant to be refused, and these were: {told or 'none'}"
        checks.append(Check("the server refuses what it is meant to, once", False, note))
    return Visit(checks, len(seen), meant)


def _run(command: Sequence[str], home: Path, environment: Mapping[str, str], log: Any) -> str:
    """Run to the end; returns what went wrong with the process, if anything."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # with what it starts, to be ended together
    )
    try:
        code = process.wait(_LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return f"it took more than {_LONGEST:.0f} s"
    return f"it ended with status {code}" if code else ""


def _mark(server: Served) -> int:
    """The length of the server's log, once all is in it that was asked before."""
    name = server.get("/version").headers["X-Request-Id"]
    until = time.monotonic() + 30
    while not any(name in line for line in server.log[-20:]):
        assert time.monotonic() < until, "the server's log lacks a request"
        time.sleep(0.01)
    return len(server.log)


def _requests(log: Sequence[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log if line.startswith("{")]
    return [line for line in lines if line.get("path", "/version") != "/version"]
