"""benchmarks/load/serving.py: a sweep over scripted servers, what is run when, and the page it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specinfer.bench.exchange import Exchange
from specinfer.bench.load_figures import figures
from tests.unit.benchmarks.conftest import Run

FAKE = ("$python", str(Path(__file__).parent / "fake_server.py"), "--port", "$port")


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("serving")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Question {n}", "And?"]}) + "\n" for n in range(12)))
    return str(path)


@pytest.fixture
def model(pair: tuple[str, str]) -> str:
    """A model that no server here reads."""
    return pair[0]


def fake(bench: ModuleType, name: str, *flags: str, plain: str = "fake", **more: Any) -> Any:
    return bench.Engine(name=name, plain=plain, command=(*FAKE, *flags), bits="none", **more)


def table(page: list[str]) -> dict[tuple[str, str], list[str]]:
    """The rows of a page: users and engine -> the other cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("| ")]
    return {(users, name): cells for users, name, *cells in rows if users != "users"}


@pytest.mark.thorough
def test_a_sweep_over_servers_and_their_users(
    bench: ModuleType,
    run: Run,
    model: str,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = (
        fake(bench, "fake"),
        fake(bench, "fake+guess", "--guess", "--other-texts"),
        fake(bench, "fake+broken", "--mishap", "start"),
        fake(bench, "fake+mortal", "--mishap", "end"),
        fake(bench, "absent", plain="absent", environment="absent"),
    )
    monkeypatch.setattr(bench, "ENGINES", engines)
    options = [
        "--model",
        model,
        "--dataset",
        prompts,
        "--users",
        "1,3",
        "--per-user",
        "3",
        "--max-tokens",
        "20",
    ]
    more = ["--home", str(tmp_path), "--timeout", "60"]
    page = run(bench, *options, *more)
    assert page[0] == "# target: servers under load"
    assert "## questions" in page
    rows = table(page)
    assert list(rows) == [(users, engine.name) for users in ("1", "3") for engine in engines]
    for users in ("1", "3"):
        bits, speed, times, *_, per_step, failed, same = rows[users, "fake"]
        assert (bits, times, per_step, failed, same) == ("none", "", "", "0", "")
        assert float(speed) > 0
        _, speed, times, *_, per_step, failed, same = rows[users, "fake+guess"]
        assert float(times) > 0
        assert (per_step, failed) == ("2.50", "0")
        # One text differs, among 8 prompts, or 9 for three users.
        assert same == {"1": "7/8", "3": "8/9"}[users]
        assert rows[users, "fake+broken"][1] == "ended with exit code 1: no such model"
        assert rows[users, "absent"][1] == "not installed; run: make peers-env"
    assert rows["1", "fake+mortal"][-1] == "8/8"
    assert "failed the warm-up: the connection failed" in rows["3", "fake+mortal"][1]
    cells = json.loads((tmp_path / "page.json").read_text())["cells"]
    cell = cells["fake|0|questions|3"]
    # Nine questions, each of ten letters.
    assert (cell["completed"], cell["total_output_tokens"], len(cell["texts"])) == (9, 90, 9)
    assert cell["tokens_counted_as_chunks"] == 0
    assert 0 <= cell["busy_elsewhere"] < 1000

    # Failed cells run again, finished ones do not.
    started = []
    start = bench.start
    monkeypatch.setattr(
        bench, "start", lambda engine, *args: started.append(engine.name) or start(engine, *args)
    )
    again = table(run(bench, *options, *more))
    assert started == ["fake+broken", "fake+mortal", "absent"]
    assert again["3", "fake+guess"] == rows["3", "fake+guess"]


def test_too_few_prompts_and_two_of_one_name_are_refused(
    bench: ModuleType, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["serving.py", "--model", model, "--dataset", prompts, *options])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        return str(ended.value.code)

    assert ends() == "error: questions has 12 prompts, too few for 32 users; change one"
    assert ends("--dataset", prompts) == "error: two data sets have one name; rename a file"
    assert ends("--engines", "vlm").startswith(
        "error: no engine is called 'vlm', or it needs --draft; allowed"
    )


@pytest.mark.parametrize(
    ("patterns", "has_draft", "expected"),
    [
        ("vllm+draft", True, ["vllm", "vllm+draft"]),
        ("vllm*", False, ["vllm", "vllm+ngram"]),
        ("specinfer-int8+ngram-*,llama.cpp-q8_0", False,
         ["specinfer-int8", "specinfer-int8+ngram-fixed", "specinfer-int8+ngram-cost", "llama.cpp-q8_0"]),
    ],
)  # fmt: skip
def test_without_speculation_an_engine_is_always_beside(
    bench: ModuleType, patterns: str, has_draft: bool, expected: list[str]
) -> None:
    assert [e.name for e in bench.select(bench.ENGINES, patterns, has_draft=has_draft)] == expected


def test_every_engine_can_be_started_and_has_its_plain_one(bench: ModuleType) -> None:
    names = {engine.name for engine in bench.ENGINES}
    values = {name: f"<{name}>" for name in ("python", "model", "draft", "port", "threads")}
    values |= {name: f"<{name}>" for name in ("cores", "context", "users")}
    for engine in bench.ENGINES:
        command, variables = engine.started(**values)
        assert engine.plain in names
        assert {"<model>", "<port>", "<context>"} <= set(command)
        assert "$" not in " ".join([*command, *variables.values()])
        assert engine.draft == ("draft" in engine.name)
        assert any("<draft>" in word for word in command) == engine.draft


def test_a_cell_keeps_figures_and_digests(bench: ModuleType) -> None:
    def result(*exchanges: Exchange) -> dict[str, Any]:
        texts = [exchange.text for exchange in exchanges]
        return {**figures(exchanges, 2.0), "generated_texts": texts, "client_cores": 1 / 3}

    answered = Exchange(0.0, [1.0], 2.0, text="yes", completion_tokens=4)
    failed = replace(answered, error="HTTP 429: slow down")
    cell = bench.kept(result(answered, failed))
    assert (cell["completed"], cell["failed"], cell["output_throughput"]) == (1, 1, 2.0)
    assert cell["client_cores"] == 0.3333
    assert cell["reason"] == "HTTP 429: slow down"
    assert [len(text) for text in cell["texts"]] == [8, 0]
    assert bench.kept(result(failed, failed)) == {"error": "HTTP 429: slow down"}


def cell(speed: float, **more: Any) -> dict[str, Any]:
    """A cell of the page below."""
    times = {f"{part}_{name}_ms": 100.0 for part in ("median", "p99") for name in ("ttft", "tpot", "e2el")}
    return {
        **times,
        **{"p99_itl_ms": 80.0, "request_throughput": speed / 10, "output_throughput": speed},
        **{"completed": 2, "failed": 0, "tokens_counted_as_chunks": 0, "texts": ["aa", "bb"]},
        **{"client_cores": 0.05, "busy_elsewhere": 0.1, "version": "fake 1.0"},
        **more,
    }


def test_the_page_compares_round_by_round(bench: ModuleType) -> None:
    engines = [fake(bench, "fake"), fake(bench, "fake+guess"), fake(bench, "fake+mute")]
    guess = {"tokens_per_step": 2.5, "texts": ["aa", "cc"]}
    cells = {
        "fake|0|q|4": cell(10.0),
        "fake|1|q|4": cell(20.0, texts=["aa", ""], failed=1, reason="HTTP 500: no"),
        "fake+guess|0|q|4": cell(30.0, **guess),
        "fake+guess|1|q|4": cell(40.0, **guess, busy_elsewhere=0.7),
        "fake+guess|2|q|4": {"error": "ended | badly"},
        "fake+mute|0|q|4": cell(5.0, tokens_counted_as_chunks=2),
    }
    settings = {
        **{"model": "m", "draft": "d", "datasets": ["q"], "users": [4, 8], "rounds": 3, "limit": 9},
        **{"per_user": 2, "least": 8, "max_tokens": 7, "ignore_eos": False, "threads": 2},
    }
    page = bench.page(engines, cells, settings)
    assert page[0] == "# m (draft: d): servers under load"
    rows = table(page)
    assert rows["4", "fake"] == [
        *("none", "15.0 [10.0 - 20.0]", "", "1.50 [1.00 - 2.00]", "100 / 100", "100.0 / 100.0", "80"),
        *("0.1 / 0.1", "", "1", ""),
    ]
    # 30 over 10 and 40 over 20; of three pairs of texts that both have, two are the same.
    assert rows["4", "fake+guess"] == [
        *("none", "35.0 [30.0 - 40.0]", "2.50", "3.50 [3.00 - 4.00]", "100 / 100", "100.0 / 100.0", "80"),
        *("0.1 / 0.1", "2.50", "0", "2/3"),
    ]
    assert rows["4", "fake+mute"][1:3] == ["5.0*", "0.50"]
    assert rows["8", "fake+guess"] == ["none", "not run yet", *[""] * 9]
    cells["fake+guess|0|q|8"] = {"error": "ended | badly"}
    assert table(bench.page(engines, cells, settings))["8", "fake+guess"][1] == "ended / badly"
    assert page[-4:] == [
        "- servers: fake 1.0",
        "- failed requests of fake|1|q|4: HTTP 500: no",
        "- other programs kept at most 0.70 cores busy (beside fake+guess|1|q|4)",
        "- the client kept at most 0.05 cores busy (beside fake|0|q|4)",
    ]


def test_a_server_that_is_never_ready_is_ended(bench: ModuleType) -> None:
    server = bench.Server([sys.executable, "-c", "import time; time.sleep(60)"], {}, bench.free_port())
    with pytest.raises(bench.WorkerError, match="not ready within 0 s"), server:
        server.wait_until_ready(0.3)
    assert server._process.poll() is not None
