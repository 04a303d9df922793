"""`specinfer bench` from options to figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specinfer.cli.bench import bench
from specinfer.errors import ConfigError, DatasetError
from tests.fake_openai_server import DONE, FakeServer, Received, Reply, chat, error, usage


def run(*arguments: str) -> str:
    result = CliRunner().invoke(bench, [*arguments, "--max-tokens", "6"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_file_and_picture(pair: list[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    printed = run(*pair, "--limit", "3", "--json", str(out), "--plot", str(picture))
    result = json.loads(out.read_text())
    assert f"speedup: {result['speedup']:.2f}x" in printed
    assert "without speculation" in printed
    assert "identical texts: 3 of 3" in printed
    assert (result["requests"], result["dataset"]["name"]) == (3, "built-in")
    assert result["options"]["chat"] is False
    assert result["command"]
    assert picture.stat().st_size > 5000


def test_a_data_set_sampled_in_a_batch_and_printed_as_json(pair: list[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"prompt": "a"}\n')
    printed = run(
        *pair, "--dataset", str(rows), "--temperature", "1", "--seed", "3", "--batch-size", "2", "--json", "-"
    )
    result = json.loads(printed)
    assert (result["requests"], result["identical"]) == (3, 3)
    assert result["dataset"]["duplicates_dropped"] == 1
    assert result["options"]["scheduler"]["max_batch_size"] == 2
    assert result["options"]["sampling"]["seed"] == 3


def test_invalid_comparisons_are_refused(pair: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculation is off"):
        run(*pair[:2], "--no-ngram", "--kv-cache-memory", "64MB")
    with pytest.raises(ConfigError, match="batch size is 0"):
        run(*pair, "--batch-size", "0")
    with pytest.raises(DatasetError, match="cannot read the data set"):
        run(*pair, "--dataset", str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="there is no folder"):
        run(*pair, "--json", str(tmp_path / "none" / "out.json"))


SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 1}


def run_load(*arguments: str) -> Result:
    return CliRunner(env={"OPENAI_API_KEY": ""}).invoke(bench, [*arguments], catch_exceptions=False)


def question(received: Received) -> str:
    return str(received.body["messages"][-1]["content"])


def shout(received: Received) -> Reply:
    """The question in capitals, one chunk a letter; the question `limit` is refused."""
    if question(received) == "limit":
        return error("429 Too Many Requests", "slow down")
    letters = [chat(letter) for letter in question(received).upper()]
    return Reply([*letters, chat("", "stop"), usage(3, 4, **SPECULATION), DONE])


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    turns: list[list[str]] = [["ab", "cd"], ["ef"], ["limit", "gh"], ["ij"]]
    path.write_text("".join(json.dumps({"turns": printed}) + "\n" for printed in turns))
    return str(path)


def test_a_run_from_options_to_the_file(rows: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with FakeServer(shout) as server:
        options = ["--dataset", rows, "--max-tokens", "9", "--seed", "7", "--body", '{"speculation": false}']
        more = ["--save-texts", "--out", str(out), "--api-key", "secret", "--warmup", "0"]
        done = run_load("--url", server.url, *options, *more)
    assert done.exit_code == 0
    result = json.loads(out.read_text())
    assert result["generated_texts"] == ["AB", "CD", "EF", "", "", "IJ"]
    assert result["errors"] == ["", "", "", "HTTP 429: slow down", "not asked, as turn 1 failed", ""]
    assert (result["completed"], result["failed"], result["num_prompts"]) == (4, 2, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12, 16)
    assert (result["max_concurrency"], result["request_rate"], result["burstiness"]) == (1, "inf", 1)
    assert (result["max_concurrent_requests"], result["tokens_counted_as_chunks"]) == (1, 0)
    assert result["output_throughput"] == pytest.approx(16 / result["duration"])
    assert result["request_throughput"] == pytest.approx(4 / result["duration"])
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] <= result["p99_e2el_ms"]
    assert result["speculative_decoding"]["mean_acceptance_length"] == 1.5
    assert (result["model_id"], result["base_url"]) == ("fake-model", server.url)
    assert result["endpoint"] == "/v1/chat/completions"
    assert result["options"]["body"] == {"speculation": False}
    assert "secret" not in out.read_text()
    # Requests: seeds by index in the data set; the second question includes the first answer.
    assert [received.body["seed"] for received in server.received] == [7, 8, 9, 10, 12]
    assert [message["content"] for message in server.received[1].body["messages"]] == ["ab", "AB", "cd"]
    assert {received.body["speculation"] for received in server.received} == {False}
    assert {received.headers["authorization"] for received in server.received} == {"Bearer secret"}
    # Output.
    assert f"fake-model at {server.url}/v1/chat/completions, 6 requests of {rows}, 1 at a time" in done.stdout
    assert "requests completed / failed  4 / 2" in done.stdout
    assert "speculation: 1.50 tokens per step, 4 of 16 drafted tokens accepted (25%)" in done.stdout
    assert "failed requests: 2; request 4: HTTP 429: slow down" in done.stdout


def test_users_ask_at_once_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    rows = tmp_path / "single.jsonl"
    rows.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in "abcd"))
    with FakeServer(shout, together=3) as server:  # which answers three requests at once, or none
        arguments = ["--dataset", str(rows), "--num-requests", "3", "--concurrency", "3", "--warmup", "3"]
        done = run_load("--url", server.url, *arguments, "--timeout", "30", "--json", "-")
    result = json.loads(done.stdout)
    assert (result["completed"], result["max_concurrent_requests"], result["num_prompts"]) == (3, 3, 3)
    assert sorted(map(question, server.received[:3])) == [
        f"Write the numbers from {n} to {n + 50}, in words." for n in range(3)
    ]
    assert sorted(map(question, server.received[3:])) == ["a", "b", "c"]


def test_the_status_is_1_without_answers(rows: str) -> None:
    with FakeServer(lambda received: error("500 Internal Server Error", "no")) as server:
        done = run_load("--url", server.url, "--dataset", rows, "--warmup", "0")
        assert done.exit_code == 1
        assert "requests completed / failed  0 / 6" in done.stdout
        with pytest.raises(ConfigError, match=rf"{server.url} failed the warm-up: HTTP 500: no"):
            run_load("--url", server.url, "--dataset", rows)


def test_a_load_does_not_load_torch(rows: str) -> None:
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('specinfer', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    with FakeServer(shout) as server:
        command: list[Any] = [sys.executable, "-c", code, "bench", "--url", server.url, "--dataset", rows]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "output tokens/s" in done.stdout
