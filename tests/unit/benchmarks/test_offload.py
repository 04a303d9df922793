"""benchmarks/offload/offload.py: its runs, memory limits, users and page."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specinfer import LLM, SamplingParams

Script = Callable[[str], ModuleType]
SETTINGS = {
    **{"model": "m", "max_tokens": 64, "prompts": 2, "threads": 2, "draft": ["s"], "rate": None},
    **{"peer_prompts": 2, "peer_tokens": 24},
}
PROMPTS = [[5, 3, 8], [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def bench(script: Script) -> ModuleType:
    return script("offload")


@pytest.fixture(scope="module")
def cells(bench: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.offload.cells"]


@pytest.fixture(scope="module")
def pages(bench: ModuleType) -> ModuleType:
    return sys.modules["benchmarks.offload.page"]


def plan(bench: ModuleType, rows: str, **options: Any) -> list[str]:
    """The names of all cells, in the order they run."""
    given: dict[str, Any] = {
        "limits": [0.5],
        "kinds": ["none"],
        "inflate": None,
        "inflated_limits": [0.5],
        "temperatures": [0.0],
        "batches": [1],
        "rounds": 1,
        "only": "",
    }
    ours = SimpleNamespace(args=Namespace(**given | options), prompts={"chat": [], "edits": []})
    return [name for name, _ in bench.cells_of(ours, bench.select(rows))]


# Commands.


def test_rows_of_a_question_run_in_turns_every_second_round_in_reverse(bench: ModuleType) -> None:
    assert plan(bench, "plain,self,prediction", rounds=2, only="") == [
        "dithered none 100%|chat T=0 batch 1|resident|0",
        "dithered none 50%|chat T=0 batch 1|plain|0",
        "dithered none 50%|chat T=0 batch 1|self|0",
        "dithered none 50%|chat T=0 batch 1|self|1",
        "dithered none 50%|chat T=0 batch 1|plain|1",
        "dithered none 100%|chat T=0 batch 1|resident|1",
        "dithered none 100%|edits T=0 batch 1|resident|0",
        "dithered none 50%|edits T=0 batch 1|plain|0",
        "dithered none 50%|edits T=0 batch 1|self|0",
        "dithered none 50%|edits T=0 batch 1|prediction|0",
        "dithered none 50%|edits T=0 batch 1|prediction|1",
        "dithered none 50%|edits T=0 batch 1|self|1",
        "dithered none 50%|edits T=0 batch 1|plain|1",
        "dithered none 100%|edits T=0 batch 1|resident|1",
    ]


def test_peers_are_asked_greedily_one_prompt_at_a_time_and_int4_has_no_self_draft(bench: ModuleType) -> None:
    names = plan(bench, "*", kinds=["none", "int4"], temperatures=[0.0, 0.8], batches=[1, 4], inflate=9)
    peers = [name for name in names if "llama.cpp" in name or "accelerate" in name or "airllm" in name]
    assert {name.rpartition("|")[0].rpartition("|")[0] for name in peers} == {
        "dithered none 50%|chat T=0 batch 1"
    }
    assert len(peers) == 7
    assert not [name for name in names if " int4 " in name and "|self|" in name]
    assert any(name.startswith("inflated none 50%|chat T=0.8 batch 4|self|") for name in names)
    resident = [name for name in names if "|resident|" in name]
    assert all(name.startswith("dithered") for name in resident), "whose text an inflated model's is"


def test_other_quantizations_are_run_plain_in_the_same_memory(bench: ModuleType) -> None:
    names = plan(bench, "plain,auto", limits=[0.25], temperatures=[0.0, 0.8])
    others = [name for name in names if not name.startswith("dithered none")]
    assert others == [f"dithered {kind}|chat T=0 batch 1|plain|0" for kind in ("int8 50%", "int4 84%")]
    assert "int4" not in str(plan(bench, "plain", limits=[0.5]))


def test_what_failed_does_not_run_in_later_rounds(bench: ModuleType) -> None:
    done = {"a|b|c|0": {"error": "was missing"}, "a|b|d|0": {"answers": []}}
    assert bench.failed_before("a|b|c|1", done)
    assert not bench.failed_before("a|b|c|0", done), "it is tried again"
    assert not bench.failed_before("a|b|d|1", done)


def test_an_unknown_row_is_refused(bench: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no row is called 'selves'; allowed, .*: plain, self, small"):
        bench.select("plain, selves")


def test_every_peer_has_a_script(bench: ModuleType, cells: ModuleType) -> None:
    for row in bench.select("*"):
        assert row.peer is None or (cells.PEERS / f"run_{row.peer}.py").exists()


# A cell.


def test_what_comes_behind_the_first_tokens_of_all_is_timed(cells: ModuleType) -> None:
    one = {"arrivals": [[1.0, 1], [2.5, 3], [4.0, 2]]}
    other = {"arrivals": [[2.0, 1], [3.0, 4], [5.0, 1]]}
    assert cells.timed([one, other]) == {"first": 2.0, "tokens": 10, "seconds": 3.0, "passes": 2}
    assert cells.timed([{"arrivals": [[3.0, 8]]}]) == {"first": 3.0, "tokens": 0, "seconds": 0.0, "passes": 0}


def test_nobody_is_run_where_no_group_can_be_made(
    bench: ModuleType,
    cells: ModuleType,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["benchmarks.machines.memory_group"], "_parents", list)

    def refuse(*_: Any) -> None:
        raise AssertionError("a run has no limit")

    monkeypatch.setattr(cells, "Worker", refuse)
    [row] = bench.select("plain")
    question = cells.Question("chat", 0.0, 1)
    cell = cells.run_cell(tiny(cells, pair), cells.Limit("dithered", "none", 0.5), question, row, 0)
    assert cell == {"error": "not run: no memory cgroup is mounted"}


def test_the_resident_run_of_a_batch_says_what_a_prompt_alone_says(
    bench: ModuleType, cells: ModuleType, own_cache: Path, pair: tuple[str, str]
) -> None:
    row = bench.Row(name="resident", options={"lookup": False, "max_nodes": 1})
    known, question = cells.Limit("dithered", "none", 1), cells.Question("chat", 0.8, 2)
    cell = cells.run_cell(tiny(cells, pair), known, question, row, 0)
    assert "error" not in cell
    with LLM(pair[0], dtype="bfloat16", kv_cache_memory=1 << 20) as llm:
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.8, seed=number, max_tokens=6, ignore_eos=True)
            [output] = llm.generate([prompt], params)
            text, head = map(sys.modules["benchmarks.study"].digest, (output.token_ids, output.token_ids[:4]))
            assert cell["answers"][number] == {"prompt": number, "text": text, "head": head}
    [group] = cell["groups"]
    assert (group["tokens"], group["passes"], group["counted"]["steps"]) == (10, 5, 6)
    assert cell["reference"] is None
    assert cell["peak"] > 1 << 20


def tiny(cells: ModuleType, pair: tuple[str, str]) -> Any:
    """A bench of two short prompts on a tiny pair."""
    args = Namespace(rounds=1, max_tokens=6, peer_tokens=4, threads=1, timeout=60, rate=None, batches=[2])
    prompts = {"chat": [*map(cells.Prompt, PROMPTS)]}
    target, draft = map(Path, pair)
    return cells.Bench({"dithered": target}, target, draft, prompts, SimpleNamespace(), 1 << 20, args)


def test_reading_goes_round_in_whole_pieces(bench: ModuleType, tmp_path: Path) -> None:
    script = str(Path(str(bench.__file__)).parent / "read_rate.py")
    file = tmp_path / "file"
    file.write_bytes(b"x" * (9 << 20))
    done = subprocess.run([sys.executable, script, str(file), "0.05"], capture_output=True, text=True)
    if "Invalid argument" in done.stderr:
        pytest.skip("this disk refuses O_DIRECT")
    assert float(done.stdout) > 1e6
    file.write_bytes(b"x")
    done = subprocess.run([sys.executable, script, str(file), "0.05"], capture_output=True, text=True)
    assert "is smaller than 4194304 bytes" in done.stderr


def test_a_slowed_disk_is_as_slow_as_asked(bench: ModuleType, tmp_path: Path) -> None:
    groups, slow = (
        sys.modules["benchmarks.machines.memory_group"],
        sys.modules["benchmarks.offload.slow_disk"],
    )
    reader = Path(str(bench.__file__)).parent / "read_rate.py"
    file = tmp_path / "file"
    file.write_bytes(b"x" * (8 << 20))
    try:
        with groups.memory_group(64 << 20) as group, slow.slow_disk(group, 80 << 20, file) as inside:
            command = inside([sys.executable, str(reader), str(file), "0.4"])
            done = subprocess.run(command, capture_output=True, text=True)
            folder = slow.BLKIO / group.folder.name
            assert folder.is_dir() or (group.folder / "io.max").read_text()
    except groups.NoGroupError as error:
        pytest.skip(str(error))
    assert not folder.exists()
    if "Invalid argument" in done.stderr:
        pytest.skip("this disk refuses O_DIRECT")
    assert 20 << 20 < float(done.stdout) < 130 << 20


# The page.


def cell(
    tokens: float, seconds: float, *, passes: int = 10, texts: str = "ab", streamed: float | None = None
) -> dict[str, Any]:
    counted = (
        {} if streamed is None else {"streamed_bytes": streamed, "steps": 11, "stream_wait_seconds": 1.0}
    )
    group = {"first": 1.0, "tokens": tokens, "seconds": seconds, "passes": passes, "whole": seconds + 1}
    return {
        "answers": [{"prompt": i, "text": text, "head": "h"} for i, text in enumerate(texts)],
        "groups": [{**group, "counted": counted}],
        "versions": {"fake": "1.0"},
        "busy_elsewhere": 0.1,
        "peak": 900,
        "own": 500,
        "room": 500,
        "reference": 2e9,
        "kills": 0,
    }


@pytest.fixture
def measured() -> dict[str, Any]:
    start, known = "dithered none 50%|chat T=0 batch 1", "dithered none 100%|chat T=0 batch 1"
    return {
        f"{known}|resident|0": cell(10, 1),
        f"{start}|plain|0": cell(10, 10, streamed=11e9),
        f"{start}|plain|1": cell(10, 20),
        f"{start}|self|0": cell(50, 10),
        f"{start}|self|1": cell(50, 10, texts="ax"),
        f"{start}|small|0": {"error": "ended | badly"},
        f"{start}|auto|0": cell(45, 10),
        f"{start}|llama.cpp bf16|0": cell(1, 10),
        f"{start}|llama.cpp bf16 + small|0": cell(4, 10),
    }


def test_the_page_holds_rows_of_one_round_against_each_other(
    pages: ModuleType, measured: dict[str, Any]
) -> None:
    lines = pages.page(measured, SETTINGS)
    assert lines[lines.index("## dithered none 50% of its bytes") + 2].startswith(
        "| asked | row | tokens/s |"
    )
    asked = "chat T=0 batch 1"
    assert f"| {asked} | plain | 0.75 |  | 1.00 | 1.50 | 1000 | 2000 | 0.50 | 9% | 0.90 | 4/4 |" in lines
    assert f"| {asked} | self | 5.00 | 7.50 | 5.00 | 1.00 |  | 2000 |  |  | 0.90 | 3/4 |" in lines
    assert f"| {asked} | small | ended / badly |{'  |' * 9}" in lines
    assert f"| {asked} | llama.cpp bf16 | 0.10 | 0.10 | 0.10 | 1.00 |  | 2000 |  |  | 0.90 | 2/2 |" in lines
    best = "0.90 (self) | llama.cpp bf16 10.0 | 12.5 (self, llama.cpp bf16 + small)"
    assert f"| dithered none 50% | {asked} | {best} |" in lines
    assert "- processes that the kernel ended for want of memory: 0" in lines
    assert any(line.startswith("| SubSpec") for line in lines)


def test_the_page_compares_quantizations_in_the_same_memory(pages: ModuleType) -> None:
    asked = "chat T=0 batch 1|plain|0"
    cells = {
        f"dithered none 25%|{asked}": cell(10, 10),
        f"dithered int8 50%|{asked}": {**cell(19, 10), "room": 501},
        f"dithered int8 25%|{asked}": {**cell(7, 10), "room": 250},
        f"dithered int4 84%|{asked}": cell(38, 10),
    }
    assert [line for line in pages.page(cells, SETTINGS) if ", the same memory, " in line] == [
        "- dithered int8 50% over dithered none 25%, the same memory, chat T=0 batch 1, plain: 1.90",
        "- dithered int4 84% over dithered int8 50%, the same memory, chat T=0 batch 1, plain: 2.00",
    ]


def test_the_page_says_what_was_not_run(pages: ModuleType) -> None:
    cells = {"dithered none 50%|chat T=0 batch 1|airllm|0": {"error": "not run: no cgroups"}}
    lines = pages.page(cells, SETTINGS | {"rate": 500})
    assert f"| chat T=0 batch 1 | airllm | not run: no cgroups |{'  |' * 9}" in lines
    assert any("at most 500 MB/s" in line for line in lines)


def test_a_picture_has_a_bar_for_each_way_to_guess(
    pages: ModuleType, measured: dict[str, Any], tmp_path: Path
) -> None:
    assert pages._bars(measured) == [("dithered none 50%\nchat", {"self": 7.5, "auto": 4.5})]
    pytest.importorskip("matplotlib")
    assert pages.draw(measured, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 1000
    assert not pages.draw({}, tmp_path / "none.png")
