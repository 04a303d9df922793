"""benchmarks/peers/peers.py: the protocol with a fake engine, what is run when, and the page it writes."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE = [sys.executable, str(Path(__file__).parent / "fake_engine.py")]
PROMPTS = [[1], [10], [20], [30], [40]]


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("peers")


@pytest.fixture
def task(bench: ModuleType) -> Any:
    return bench.Task(Path("m.gguf"), None, PROMPTS, max_tokens=4, rounds=2, threads=1)


def worker(bench: ModuleType, timeout: float = 30) -> Any:
    return bench.Worker(FAKE, {}, timeout)


def setup(mishap: str | None = None) -> dict[str, Any]:
    return {"options": {} if mishap is None else {"mishap": mishap}}


# The protocol.


def test_a_worker_says_which_tokens_arrived_together(bench: ModuleType) -> None:
    with worker(bench) as fake:
        assert fake.ask(setup()) == {"versions": {"fake": "1.0"}}
        reply = fake.ask({"prompt": [7], "max_tokens": 6})
        assert reply["tokens"] == [8, 9, 10, 11, 12, 13]
        assert [n for _, n in reply["arrivals"]] == [1, 2, 2, 1]
        times = [t for t, _ in reply["arrivals"]]
        assert times == sorted(times)
        assert times[0] > 0
        assert fake.peak_memory() > 1 << 20
        assert fake.cpu_seconds() > 0


def test_what_a_library_prints_is_not_taken_for_a_reply(bench: ModuleType) -> None:
    with worker(bench) as fake:
        assert fake.ask(setup("print")) == {"versions": {"fake": "1.0"}}


@pytest.mark.parametrize(
    ("mishap", "reason"),
    [
        ("load", "ended with exit code 1: RuntimeError: no such model"),
        ("answer", "ended with exit code 1: RuntimeError: out of memory"),
        ("sleep", "no answer within 1 s"),
        ("short", "made 3 tokens of 4 for prompt 0"),
    ],
)
def test_a_mishap_is_a_reason(bench: ModuleType, task: Any, mishap: str, reason: str) -> None:
    def failing() -> None:
        with worker(bench, timeout=1 if mishap == "sleep" else 30) as fake:
            bench.converse(fake, setup(mishap), task, 0)

    with pytest.raises((bench.WorkerError, ValueError)) as caught:
        failing()
    assert str(caught.value) == reason


def test_a_worker_that_cannot_be_run_is_a_reason(bench: ModuleType) -> None:
    with pytest.raises(bench.WorkerError, match="/nowhere/python cannot be run: No such file"):
        bench.Worker(["/nowhere/python"], {}, 1)


def test_a_worker_ends_with_its_context(bench: ModuleType) -> None:
    with worker(bench) as fake:
        fake.ask(setup())
        process = fake._process
        assert process.poll() is None
    assert process.poll() == 0


# Commands.


def test_a_round_has_its_share_of_the_prompts(bench: ModuleType, task: Any) -> None:
    assert [list(task.dealt(r)) for r in range(2)] == [[0, 1], [2, 3, 4]]


def test_a_cell_holds_what_one_round_gave(bench: ModuleType, task: Any) -> None:
    with worker(bench) as fake:
        cell = bench.converse(fake, setup(), task, 1)
    assert [a["prompt"] for a in cell["answers"]] == [2, 3, 4]
    texts = [[n + i for i in range(1, 5)] for n in (20, 30, 40)]
    assert [(a["tokens"], a["text"]) for a in cell["answers"]] == [(4, digest(text)) for text in texts]
    assert {(a["first_tokens"], a["steps"]) for a in cell["answers"]} == {(1, 2)}
    assert cell["versions"] == {"fake": "1.0"}
    assert 0 <= cell["busy_elsewhere"] < 1000


def test_every_second_round_runs_in_reverse_and_nothing_finished_runs_again(bench: ModuleType) -> None:
    one, two = bench.ENGINES[:2]
    done = {f"{one.name}|0": {"answers": []}, f"{two.name}|0": {"error": "was missing"}}
    assert bench.schedule([one, two], 2, done) == [(0, two), (1, two), (1, one)]


def test_an_engine_that_is_not_installed_is_a_row_with_its_reason(
    bench: ModuleType, task: Any, tmp_path: Path
) -> None:
    vllm = next(engine for engine in bench.ENGINES if engine.name == "vllm")
    cell = bench.run_cell(vllm, task, 0, bench.Home(tmp_path), timeout=1)
    assert cell == {"error": "not installed; run: make peers-env"}


@pytest.mark.parametrize(
    ("patterns", "has_draft", "expected"),
    [
        ("transformers*", True, ["transformers", "transformers+draft", "transformers+lookup"]),
        ("transformers*", False, ["transformers", "transformers+lookup"]),
        ("vllm, specinfer-bf16", False, ["specinfer-bf16", "vllm"]),
    ],
)
def test_engines_are_chosen_by_name(
    bench: ModuleType, patterns: str, has_draft: bool, expected: list[str]
) -> None:
    assert [engine.name for engine in bench.select(patterns, has_draft=has_draft)] == expected


def test_an_unknown_engine_and_one_without_its_draft_are_refused(bench: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no engine is called 'vlm'; allowed, .* vllm, vllm\+draft"):
        bench.select("vlm", has_draft=True)
    with pytest.raises(ValueError, match=r"vllm\+draft needs a draft model; give --draft"):
        bench.select("vllm+draft", has_draft=False)


def test_every_engine_has_a_script_a_name_of_its_own_and_a_plain_mode(bench: ModuleType) -> None:
    names = [engine.name for engine in bench.ENGINES]
    assert len(names) == len(set(names))
    assert {engine.plain for engine in bench.ENGINES} <= set(names)
    scripts = {bench.SCRIPTS / f"run_{engine.script}.py" for engine in bench.ENGINES}
    assert [path for path in scripts if not path.exists()] == []


# The page.


def digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def cell(*answers: tuple[list[int], float, float, int]) -> dict[str, Any]:
    """Answers from (tokens, seconds to the first, total seconds, steps), by the prompt's first token."""
    return {
        "answers": [
            {
                "prompt": tokens[0],
                "tokens": len(tokens),
                "head": digest(tokens[:32]),
                "text": digest(tokens),
                "first_tokens": 1,
                "first_seconds": first,
                "seconds": last,
                "steps": steps,
            }
            for tokens, first, last, steps in answers
        ],
        "versions": {"fake": "1.0"},
        "load_seconds": 1.0,
        "peak_memory": 3 << 30,
        "busy_elsewhere": 0.25,
    }


def test_the_page_has_medians_agreement_and_ratios(bench: ModuleType) -> None:
    by_name = {engine.name: engine for engine in bench.ENGINES}
    engines = [by_name[n] for n in ("specinfer-bf16", "specinfer-bf16+ngram", "transformers", "vllm")]
    a, b, c = [0, *range(100, 110)], [1, *range(200, 210)], [2, *range(300, 310)]
    cells = {
        # 10 tokens after the first in 1 s, and in 2 s
        "specinfer-bf16|0": cell((a, 0.1, 1.1, 10)),
        "specinfer-bf16|1": cell((b, 0.1, 2.1, 10), (c, 0.1, 2.1, 10)),
        "specinfer-bf16+ngram|0": cell((a, 0.1, 0.6, 4)),
        "specinfer-bf16+ngram|1": cell((b, 0.1, 1.1, 5), (c, 0.1, 1.1, 5)),
        "transformers|0": cell((a, 0.5, 5.5, 10)),
        "transformers|1": cell(([*b[:-1], 9], 0.5, 5.5, 10), (c, 0.5, 5.5, 10)),
        "vllm|0": {"error": "ended with exit code 1: a | b"},
    }
    settings = {
        "model": "large",
        "draft": None,
        "datasets": ["alpaca", "gsm8k"],
        "num_prompts": 3,
        "max_tokens": 11,
        "rounds": 2,
        "threads": 2,
    }
    lines = bench.page(engines, cells, settings)
    rows = {line.split(" | ")[0]: line for line in lines if line.startswith("| ")}
    assert lines[0] == "# large: specinfer and others, batch size 1"
    # Rates of 10 and 20/4: median 7.5. Overall 11/1.1 and 22/4.2.
    assert "| specinfer-bf16 | bf16 | 7.5 [5.0 - 10.0] | 7.6 [5.2 - 10.0] | 100 [100 - 100] | 1.00" in (
        "\n".join(lines)
    )
    assert "| 2.25 [2.00 - 2.50] | 3.0 | 3/3 | 3/3 |" in lines_with(lines, "| specinfer-bf16+ngram | bf16")
    assert lines_with(lines, "| transformers | bf16").endswith("| 3.0 |  | 2/3 |")
    assert rows["| vllm"] == "| vllm | bf16 | ended with exit code 1: a / b | | | | | | |"
    # Against transformers' 2 tokens/s: 5 and 2.5 without, 10 and 5 with n-grams.
    assert lines_with(lines, "| specinfer-bf16 | 3.75 / ")
    assert lines_with(lines, "| specinfer-bf16+ngram | 7.50 / ")
    assert "- other programs kept at most 0.25 cores busy (beside specinfer-bf16)" in lines


def lines_with(lines: list[str], start: str) -> str:
    """The only line that begins so."""
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_an_engine_that_gives_all_tokens_at_once_has_no_decoding_rate(bench: ModuleType) -> None:
    from benchmarks.peers import report

    at_once = cell(([0, 5, 6], 2.0, 2.0, 0))
    at_once["answers"][0]["first_tokens"] = 3
    assert report.decode_rate(at_once) is None
    assert report.tokens_per_step(at_once) is None
    assert report.overall_rate(at_once) == 1.5


def test_a_page_keeps_the_engines_of_earlier_runs(bench: ModuleType) -> None:
    one, two, three = bench.ENGINES[:3]
    assert bench.shown([three], {f"{one.name}|0": {}}) == [one, three]
    assert bench.shown([two, one], {}) == [one, two]


# Weights.


def test_weights_are_converted_once_and_only_whole_ones_get_their_name(
    bench: ModuleType, tmp_path: Path
) -> None:
    from benchmarks.peers import weights

    model = tmp_path / "m.gguf"
    model.write_bytes(b"12345")
    python = tmp_path / "home/llama_cpp/bin/python"
    python.parent.mkdir(parents=True)
    home = weights.Home(tmp_path / "home")
    assert home.weights(model, "file") == model
    python.write_text('#!/bin/sh\ncp "$2" "$3"\nexit 3\n')
    python.chmod(0o755)
    with pytest.raises(weights.WeightsError, match=r"to_gguf.py failed: exit code 3"):
        home.weights(model, "q8_0")
    python.write_text('#!/bin/sh\n[ "$4" = Q8_0 ] && cp "$2" "$3"\n')
    made = home.weights(model, "q8_0")
    assert made.name == "m-5-q8_0.gguf"
    assert made.read_bytes() == b"12345"
    python.write_text("#!/bin/sh\nexit 1\n")
    assert home.weights(model, "q8_0") == made


def test_weights_that_cannot_be_made_say_why(bench: ModuleType, tmp_path: Path) -> None:
    from benchmarks.peers import weights

    home = weights.Home(tmp_path / "home")
    assert home.weights(tmp_path, "safetensors") == tmp_path
    with pytest.raises(weights.WeightsError, match=r"is a folder; q4_0 is made from a \.gguf file only"):
        home.weights(tmp_path, "q4_0")
    model = tmp_path / "m.gguf"
    model.write_bytes(b"12345")
    with pytest.raises(weights.WeightsError, match="need the transformers environment; run: make peers-env"):
        home.weights(model, "safetensors")


def test_a_ratio_ignores_rounds_that_only_one_engine_has(bench: ModuleType) -> None:
    from benchmarks.peers import report

    fast, slow = cell(([0, 1, 2], 0.0, 1.0, 2)), cell(([0, 1, 2], 0.0, 4.0, 2))
    assert report.ratio(report.decode_rate, {0: fast, 1: fast}, {0: slow}) == 4.0
    assert report.ratio(report.decode_rate, {1: fast}, {0: slow}) is None
