"""benchmarks/study.py: cells that outlive an interruption, the page, the options."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specinfer.errors import ConfigError
from specinfer.report.dataset import Conversation, Dataset

SETTINGS = {"model": "small.gguf", "modes": ("a", "b")}
SCRIPTS = (
    *(
        "boosting",
        "checkpoint_formats",
        "deciding",
        "grammar",
        "head_step",
        "experts",
        "identity",
        "kernels",
        "latency",
        "lm_eval_parity",
        "lora",
        "neighbour",
        "offload",
        "overhead",
        "parameters",
        "policy_live",
        "policy_traces",
    ),
    *(
        "pairs",
        "parity_transformers",
        "peers",
        "perplexity",
        "prediction",
        "rank_peers",
        "rank_texts",
        "ranks",
        "replicas",
        "serving",
        "soak",
        "streamed_experts",
        "structured",
        "table2",
        "tree_nodes",
        "upcycled",
    ),
)


@pytest.fixture(scope="module")
def study(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("study")


@pytest.fixture(autouse=True)
def commit(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says which commit runs."""

    def now(sha: str) -> None:
        monkeypatch.setattr(study, "commit", lambda: sha)

    now("aaa")
    return now


def test_cells_are_on_disk_one_a_line_and_are_there_again(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results" / "page.md"
    first = study.Study("speed", out, SETTINGS)
    assert first.cells == {}
    first.keep("greedy|1", {"steps": 3, "texts": [[1, 2], [3]]})
    first.keep("T=1", {"steps": 4})
    kept = {"greedy|1": {"steps": 3, "texts": [[1, 2], [3]], "commit": "aaa"}}
    kept["T=1"] = {"steps": 4, "commit": "aaa"}
    assert study.Study("speed", out, SETTINGS).cells == kept
    file = out.with_suffix(".json")
    assert json.loads(file.read_text()) == {"settings": {**SETTINGS, "modes": ["a", "b"]}, "cells": kept}
    assert [line[:10] for line in file.read_text().splitlines()] == [
        '{"settings',
        '"cells": {',
        '"greedy|1"',
        '"T=1": {"s',
        "}}",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["page.json"]


def test_cells_of_other_settings_are_refused(study: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    study.Study("speed", out, SETTINGS).keep("one", {})
    with pytest.raises(SystemExit, match=r"got --out .*page.json; cells would lie where the page does"):
        study.Study("q", out.with_suffix(".json"), SETTINGS)
    with pytest.raises(SystemExit, match=r"page.json holds cells of .*small.*, not .*large.*another --out"):
        study.Study("speed", out, {**SETTINGS, "model": "large.gguf"})


def test_a_cell_that_was_measured_of_something_else_is_measured_again(
    study: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "page.md"
    first = study.Study("speed", out, SETTINGS)
    for name in ("same", "changed", "gone"):
        first.keep(name, {"digest": study.digest(name)})
    now = {"same": study.digest("same"), "changed": study.digest("other"), "new": study.digest("new")}
    assert list(study.Study("speed", out, SETTINGS, now).cells) == ["same"]


def test_the_page_says_where_its_figures_come_from(
    study: ModuleType, tmp_path: Path, commit: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/far/load/speed.py", "--model=/models/small.gguf", "--limit", "3"])
    speed = study.Study("speed", tmp_path / "page.md", SETTINGS)
    speed.keep("one", {})
    assert "measured at" not in speed.write(["# Speed"], 3)
    commit("bbb")
    speed.keep("two", {})
    page = speed.write(["# Speed", "", "| 1 |"], 3)
    assert (tmp_path / "page.md").read_text() == page
    lines = page.splitlines()
    assert lines[:4] == ["# Speed", "", "| 1 |", ""]
    assert lines[5] == "- command: `python -m benchmarks.load.speed --model=small.gguf --limit 3`"
    assert lines[8].endswith(" GiB, 3 threads")
    assert lines[9] == "- cells measured at: aaa, bbb"


def test_a_page_that_cannot_be_written_says_so(study: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="cannot write"):
        study.Study("speed", tmp_path / "file" / "page.md", SETTINGS).write([])


def test_a_page_without_a_name_lies_in_results(study: ModuleType) -> None:
    out = study.Study("speed", None, {"model": "No-Such-Model.gguf"}).out
    assert out.parent == study.RESULTS
    assert out.name.startswith("speed_no-such-model_")


def test_common_options_have_each_scripts_defaults(study: ModuleType) -> None:
    options = study.parser("Speed.", model=study.REQUIRED, dataset=study.REQUIRED, draft=[], limit=7)
    args = options.parse_args(["--model", "m", "--dataset", "a/b.jsonl", "--dataset", "c.jsonl"])
    assert vars(args) == {
        "model": "m",
        "dataset": [Path("a/b.jsonl"), Path("c.jsonl")],
        "draft": [],
        "limit": 7,
        "out": None,
    }
    assert study.settings_of(args, without=["draft"]) == {
        "model": "m",
        "dataset": ["b.jsonl", "c.jsonl"],
        "limit": 7,
    }
    assert study.settings_of(Namespace(model="far/away/m.gguf", batch=None, out=1)) == {
        "model": "m.gguf",
        "batch": None,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the following arguments are required: --model"),
        (["--model", "m", "--limit", "0"], "argument --limit: 0; allowed: an integer >= 1"),
        (["--model", "m", "--limit", "-2"], "argument --limit: -2; allowed: an integer >= 1"),
    ],
)
def test_bad_options_are_refused(
    study: ModuleType, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        study.parser("Speed.", model=study.REQUIRED, limit=7).parse_args(options)
    assert words in capsys.readouterr().err


def test_a_users_mistake_is_one_line(study: ModuleType) -> None:
    def main() -> None:
        raise ConfigError("limit is 0")

    with pytest.raises(SystemExit, match=r"^error: limit is 0$"):
        study.run(main)


def test_data_sets_take_turns(study: ModuleType) -> None:
    def dataset(name: str, count: int) -> Dataset:
        return Dataset(name, tuple(Conversation((f"{name}{i}",)) for i in range(count)), 0)

    def questions(*datasets: Dataset, limit: int) -> list[str]:
        return [conversation.turns[0] for conversation in study.in_turn(datasets, limit)]

    assert questions(dataset("a", 3), dataset("b", 1), limit=10) == ["a0", "b0", "a1", "a2"]
    assert questions(dataset("a", 3), dataset("b", 3), limit=3) == ["a0", "b0", "a1"]


def test_every_script_is_here(study: ModuleType) -> None:
    found = {path.stem: path for path in Path(study.__file__).parent.glob("*/*.py")}
    programs = {name for name, path in found.items() if "benchmarks.study import" in path.read_text()}
    parts = {"serving_report", "replicas_page", "report", "page", "cells"}  # of others
    assert programs == {*SCRIPTS, *parts}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_it_is_used(
    script: Any, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    asks = {"deciding": "", "experts": "", "streamed_experts": ""}.get(name, " --model ")
    [path] = Path(script("study").__file__).parent.glob(f"*/{name}.py")
    assert f"python -m benchmarks.{path.parent.name}.{name}{asks}" in said
    assert "--out OUT" in said
