"""Runs one client's script against a server and collects its checks."""

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

_TIMEOUT: Final = 900.0  # seconds per script
# Clients can reach only the server: no hub, no telemetry, no other proxy.
_OFFLINE: Final = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1"),
    **{f"PROMPTFOO_DISABLE_{name}": "1" for name in ("TELEMETRY", "UPDATE", "REMOTE_GENERATION")},
    **dict.fromkeys(("OPENAI_AGENTS_DISABLE_TRACING", "VLLM_NO_USAGE_STATS", "PYTHONUNBUFFERED"), "1"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    **{"HAYSTACK_TELEMETRY_ENABLED": "False", "AIDER_ANALYTICS": "false"},
}
# Variables that scripts inherit; API keys and model addresses of the machine are left out.
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check in a client's script."""

    title: str
    passed: bool
    note: str  # reason of a failure


@dataclass(frozen=True, slots=True)
class Visit:
    """A client's checks, and the number of its requests in the server's log."""

    checks: Sequence[Check]
    requests: int
    refused: int  # expected refusals among them

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(check.passed for check in self.checks)


def visit(command: Sequence[str], home: Path, server: Served, variables: Mapping[str, str]) -> Visit:
    """Run a client's script with `home` as its home folder; its output is kept there as log.txt."""
    shutil.rmtree(home, ignore_errors=True)  # a cache of the last run could answer instead of the server
    home.mkdir(parents=True)
    report = home / "report.jsonl"
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment = {**kept, **_OFFLINE, **variables, "HOME": str(home), "ZOO_REPORT": str(report)}
    start = _log_length(server)
    with (home / "log.txt").open("w", encoding="utf-8") as log:
        ending = _run(command, home, environment, log)
    lines = [json.loads(line) for line in report.read_text("utf-8").splitlines()] if report.exists() else []
    plain = {line.get("plain") for line in lines}  # requests that scripts sent without their client
    logged = _requests(server.log[start : _log_length(server)])
    seen = [line for line in logged if line["request_id"] not in plain]
    checks = [Check(line["check"], line["passed"], line["note"]) for line in lines if "check" in line]
    if ending or not checks:
        checks.append(Check("the script runs to its end", False, ending or "no check ran"))
    refused = [line for line in seen if line["status"] >= 400]
    expected = sum(line.get("refused", 0) for line in lines)
    listed = ", ".join(f"{line['method']} {line['path']} {line['status']}" for line in refused)
    if len(refused) != expected:
        note = f"expected {expected} refusals, got {len(refused)}: {listed or 'none'}"
        checks.append(Check("the server refuses only the expected requests, once each", False, note))
    return Visit(checks, len(seen), expected)


def _run(command: Sequence[str], home: Path, environment: Mapping[str, str], log: Any) -> str:
    """Run a process to its end; return its failure, or an empty string."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that its child processes can be killed with it
    )
    try:
        code = process.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return f"timeout after {_TIMEOUT:.0f} s"
    return f"exit status {code}" if code else ""


def _log_length(server: Served) -> int:
    """Return the length of the server's log after all earlier requests are in it."""
    name = server.get("/version").headers["X-Request-Id"]
    until = time.monotonic() + 30
    while not any(name in line for line in server.log[-20:]):
        assert time.monotonic() < until, "the server's log lacks a request"
        time.sleep(0.01)
    return len(server.log)


def _requests(log: Sequence[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log if line.startswith("{")]
    return [line for line in lines if line.get("path", "/version") != "/version"]
