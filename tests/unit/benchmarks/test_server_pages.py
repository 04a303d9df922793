"""Pages of benchmarks/load/soak.py and latency.py from their measurements."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from specinfer import SamplingParams
from specinfer.bench.exchange import Exchange

Script = Callable[[str], ModuleType]


def test_a_soak_is_told_in_figures(script: Script) -> None:
    settings: dict[str, Any] = {"model": "m", "quantization": "int8", "clients": 4, "minutes": 0.5}
    settings |= {"batch_size": 4, "max_tokens": 8, "aborts": 10}
    cell = {
        "requests": 7,
        "failed": 1,
        "different": 2,
        "kills": 3,
        "tokens": 100,
        "seconds": 10.0,
        "offline_tokens": 120,
        "offline_seconds": 10.0,
        "server_cpu_seconds": 0.5,
        "chunks": 1000,
        "memory_before": 100 << 20,
        "memory_after_load": 110 << 20,
        "memory_after_aborts": 120 << 20,
        "idle": False,
    }
    text = "\n".join(script("soak").page(settings, cell))
    for row in (
        "| requests; failed | 7; 1 |",
        "| texts that differ from the offline text of their seed | 2 |",
        "| times the engine was killed | 3 |",
        "| output tokens/s: server; the same requests offline; ratio | 10.0; 12.0; 0.833 |",
        "| CPU time of the server's own process for a chunk, ms | 0.50 |",
        "| memory behind the load, over before | 1.100 |",
        "| memory behind 10 aborted requests | 1.200 |",
        "| all blocks free when idle | no |",
    ):
        assert row in text


def test_each_request_of_a_soak_has_a_law_and_a_seed_of_its_own(script: Script) -> None:
    load = script("soak").Load(["a", "b"], 5)
    assert [load.question(number) for number in range(3)] == ["a", "b", "a"]
    assert load.params(0) == SamplingParams(temperature=0, seed=0, max_tokens=5)
    assert load.params(4) == SamplingParams(temperature=0.8, seed=4, max_tokens=5)
    assert load.params(5).top_k == 50
    load.exchanges[0] = Exchange(0.0)
    assert load.exchanges[0].error == ""


def test_first_tokens_are_told_in_percentiles(script: Script) -> None:
    settings = {"model": "m", "quantization": "int8", "max_step_tokens": 64, "users": 8, "long": 20_000}
    cell: dict[str, Any] = {"prefill": [0.1] * 9, "alone": [0.2] * 9, "beside": [0.15] * 9}
    cell |= {"behind": [0.2, 0.4, 0.6], "long": 12.0}
    text = "\n".join(script("latency").page(settings, cell))
    assert "| one user | 9 | 200 | 200 | 200 |" in text
    assert "| one user, while 20,000 tokens are read | 3 | 400 | 560 | 596 |" in text
    assert "over the engine's own, p99: 1.50" in text
    assert "over an idle server, p99: 2.98" in text
