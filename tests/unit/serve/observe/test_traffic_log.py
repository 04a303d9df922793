"""Prompts and answers in a private file of a maximum size, with failing disks."""

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.steps import Statistics
from specinfer.errors import ConfigError
from specinfer.request import Delta, FinishReason, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import BackendError, Health, Work
from specinfer.serve.config import ServeConfig
from specinfer.serve.observe import traffic_log
from specinfer.serve.observe.metrics import Metrics
from specinfer.serve.observe.traffic_log import PrivateLines, TrafficLog
from specinfer.serve.startup import observers
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, says
from tests.unit.serve.asked import Asked

SECRET = "my secret"


class Logged:
    """A log, and the lines that it wrote or lost."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.path = folder / "traffic.jsonl"
        self._losses = threading.Semaphore(0)
        where, lost = str(self.path), self._losses.release
        self.log = TrafficLog(where, 1 << 20, model=MODEL, tokenizer=tokenizer, lost=lost)

    def lost(self, count: int) -> bool:
        """Whether that many completions have been lost, and soon."""
        return all(self._losses.acquire(timeout=30) for _ in range(count))

    @property
    def lost_more(self) -> bool:
        return self._losses.acquire(blocking=False)

    def complete(self, *names: str) -> None:
        """Log completions that say their names."""
        for name in names:
            traffic = self.log.observe(Work(name, tuple(SECRET.encode()), SamplingParams(seed=1)), 0.0)
            traffic.delta(says(name)[0], 1.0)
            traffic.end(2.0)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the closed log."""
        self.log.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def texts(self) -> list[str]:
        return [line["text"] for line in self.lines()]


@pytest.fixture
def logged(tmp_path: Path, tokenizer: Tokenizer) -> Logged:
    return Logged(tmp_path, tokenizer)


class FullDisk:
    """A disk that is full until it is not, or that keeps a writer waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.answers = threading.Event()
        self.answers.set()
        append = PrivateLines.append

        def failing(file: PrivateLines, line: bytes) -> None:
            assert self.answers.wait(30)
            if self.full:
                raise OSError(28, "No space left on device")
            append(file, line)

        monkeypatch.setattr(PrivateLines, "append", failing)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert SECRET not in caplog.text
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_line_has_all_of_a_completion(tmp_path: Path, logged: Logged, tokenizer: Tokenizer) -> None:
    figures = SpeculationFigures(steps=2, accepted_tokens=1, accepted_by={"lookup": 1})
    script = says("caf", "\u00e9", figures=figures, cached_tokens=3)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "seed": 7}
    body |= {"max_tokens": 9, "cache_salt": "mine", "logprobs": True, "speculation": False}
    body["response_format"] = {"type": "json_object"}
    http = Asked(tokenizer, script, observers=[logged.log.observe]).http
    answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [line] = logged.lines()
    assert line.pop("time")[-1] == "Z"
    assert 0 <= line.pop("first_token_seconds") <= line.pop("seconds") < 60
    assert line.pop("params").pop("speculation")["enabled"] is False
    prompt = f"user: {SECRET}\nassistant: "
    assert line == {
        **{"request_id": answer.headers["x-request-id"], "index": 0, "model": MODEL},
        **{"prompt": prompt, "prompt_token_ids": list(prompt.encode())},
        **{"text": "caf\u00e9", "token_ids": [99, 97, 102, 195, 169], "finish_reason": "stop"},
        **{"cached_tokens": 3, "prefix_miss": None, "figures": asdict(figures)},
    }
    assert line["figures"] | {"steps": 2, "accepted_by": {"lookup": 1}} == line["figures"]


def test_each_completion_that_ended_by_itself_has_a_line(logged: Logged, tokenizer: Tokenizer) -> None:
    cut, wrong = FinishReason.LENGTH, Delta("", finish_reason=FinishReason.ERROR, error="no token is left")
    scripts = says("one"), says("two", reason=cut), [wrong], [Delta("", "y", (121,)), BackendError("died")]
    http = Asked(tokenizer, *scripts, observers=[logged.log.observe]).http
    asked = ({"n": 2, "stream": True}, {}, {})
    answers = [http.post("/completions", json={"prompt": "p", **more}) for more in asked]
    assert [answer.status_code for answer in answers] == [200, 400, 500]
    first = answers[0].headers["x-request-id"]
    found = [(one["request_id"], one["index"], one["text"], one["finish_reason"]) for one in logged.lines()]
    assert found == [(first, 0, "one", "stop"), (first, 1, "two", "length")]


def test_a_full_disk_loses_lines(logged: Logged, disk: FullDisk, caplog: pytest.LogCaptureFixture) -> None:
    logged.complete("a", "b", "c")
    assert logged.lost(3)
    disk.full = False
    logged.complete("d", "e")
    assert logged.texts() == ["d", "e"]
    assert not logged.lost_more
    assert warnings(caplog) == [
        f"cannot write {logged.path}: No space left on device; completions are dropped meanwhile",
        f"{logged.path} is written again",
    ]


def test_serving_does_not_wait_for_a_slow_disk(
    tmp_path: Path,
    tokenizer: Tokenizer,
    disk: FullDisk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(traffic_log, "_MAX_WAITING", 2)
    logged = Logged(tmp_path, tokenizer)
    disk.full = False
    disk.answers.clear()
    logged.complete(*"abcdefgh")  # returns though nothing is written
    assert logged.lost(5)  # one is being written, or has not been taken yet, and two wait
    disk.answers.set()
    texts = logged.texts()
    assert len(texts) + 5 + logged.lost_more == 8
    assert texts[:2] == ["a", "b"]
    assert "completions finish faster than the disk writes them" in warnings(caplog)[0]


def test_the_option_opens_the_log_and_metrics_count_lost_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    metrics, path = Metrics(MODEL), tmp_path / "traffic.jsonl"
    with observers(ServeConfig(log_traffic=str(path)), MODEL, metrics, tokenizer) as found:
        [observe] = found
        log = observe.__self__  # type: ignore[attr-defined]
        assert isinstance(log, TrafficLog)
        log._lose("a reason")
    assert path.exists()
    exposition = metrics.text(Health(Statistics())).decode()
    assert f'specinfer:traffic_log_lost_total{{model_name="{MODEL}"}} 1.0' in exposition
    with observers(ServeConfig(), MODEL, metrics, tokenizer) as found:
        assert found == []
    nowhere, message = ServeConfig(log_traffic=str(tmp_path / "no" / "file")), "cannot write .*No such file"
    with pytest.raises(ConfigError, match=message), observers(nowhere, MODEL, metrics, tokenizer):
        pass


PLENTY = 1 << 20


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def append(path: Path, *lines: bytes, most: int = PLENTY) -> None:
    file = PrivateLines(str(path), most)
    for line in lines:
        file.append(line)
    file.close()


def test_only_the_owner_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"before\n")
    old.chmod(0o644)
    changed, fchmod = list[int](), os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda number, mode: (changed.append(mode), fchmod(number, mode)))
    for path in (new, old):
        append(path, b"line")
        assert mode(path) == 0o600
    assert changed == [0o600]  # the new one had that mode from the start
    assert old.read_bytes() == b"before\nline\n"


def test_a_full_file_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"a" * 9, b"b" * 9, b"c" * 6, b"d", most=15)
    assert (path.read_bytes(), mode(path)) == (b"cccccc\nd\n", 0o600)
    assert Path(f"{path}.1").read_bytes() == b"b" * 9 + b"\n"


@pytest.mark.parametrize("how", ["rm", "mv", "another"])
def test_a_deleted_file_is_created_again(tmp_path: Path, how: str) -> None:
    path, old = tmp_path / "log", tmp_path / "log.old"
    file = PrivateLines(str(path), PLENTY)
    file.append(b"a")
    if how == "rm":
        path.unlink()
    else:
        path.rename(old)
    if how == "another":
        path.write_bytes(b"torn")
    file.append(b"b")
    file.append(b"c")
    file.close()
    assert path.read_bytes() == (b"torn\nb\nc\n" if how == "another" else b"b\nc\n")
    assert mode(path) == 0o600
    if how != "rm":
        assert old.read_bytes() == b"a\n"


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "log"
    target.write_bytes(b"theirs\n")
    target.chmod(0o644)
    path.symlink_to(target)
    with pytest.raises(OSError, match="it is a symbolic link"):
        PrivateLines(str(path), PLENTY)
    path.unlink()
    file = PrivateLines(str(path), PLENTY)
    path.unlink()
    path.symlink_to(target)  # while it is written
    with pytest.raises(OSError, match="it is a symbolic link"):
        file.append(b"a")
    path.unlink()
    file.append(b"b")
    file.close()
    assert (target.read_bytes(), mode(target)) == (b"theirs\n", 0o644)
    assert path.read_bytes() == b"b\n"


def test_a_line_behind_a_torn_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import os, signal, sys; from specinfer.serve.observe.traffic_log import PrivateLines\n"
        "file, write = PrivateLines(sys.argv[1], 1000), os.write\n"
        "def torn(number, data): write(number, data[:3]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "file.append(b'whole'); os.write = torn; file.append(b'killed')\n"
    )
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    append(path, b"next", b"after")
    assert path.read_bytes() == b"whole\nkil\nnext\nafter\n"


def test_a_line_that_does_not_fit_on_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "log", os.write
    file = PrivateLines(str(path), PLENTY)

    def full(number: int, data: bytes) -> int:
        if len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(number, data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.append(b"torn")
    file.append(b"next")
    assert path.read_bytes() == b"tor\nnext\n"
    file.close()
