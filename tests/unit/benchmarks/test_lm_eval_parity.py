"""The comparison through lm-evaluation-harness, without the harness: its tasks, and its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROWS = [{"prompt": f"Question {n}?", "reference": [f"answer {n // 2}"]} for n in range(12)]


@pytest.fixture
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("lm_eval_parity")


def test_a_row_has_its_own_choices(bench: ModuleType) -> None:
    row = {"prompt": "Why?", "sol1": "so", "sol2": "thus", "label": 1}
    assert bench.with_choices([row], 0) == {"question": "Why?", "choices": ["so", "thus"], "label": 1}


@pytest.mark.parametrize("number", range(12))
def test_or_its_reference_among_others_of_other_rows(bench: ModuleType, number: int) -> None:
    made = bench.with_choices(ROWS, number)
    assert made["choices"][made["label"]] == f"answer {number // 2}"
    assert len(set(made["choices"])) == 4


def test_a_task_is_written_as_the_harness_reads_it(bench: ModuleType, tmp_path: Path) -> None:
    data = tmp_path / "web.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    assert bench.write_task(data, 5, folder) == "web"
    task = json.loads((folder / "web.yaml").read_text())
    data = Path(task["dataset_kwargs"]["data_files"]["test"])
    docs = [json.loads(line) for line in data.read_text().splitlines()]
    assert [doc["question"] for doc in docs] == [f"Question {n}?" for n in range(5)]
    assert {task["doc_to_choice"], task["doc_to_target"]} <= docs[0].keys()


@pytest.mark.parametrize(
    ("likelihood", "accuracy", "alike"), [(-1.5, 1.0, True), (-1.52, 1.0, False), (-1.5, 0.5, False)]
)
def test_the_page_says_whether_both_sides_say_the_same(
    bench: ModuleType, likelihood: float, accuracy: float, alike: bool
) -> None:
    ours = {
        "web": {"accuracy": 1.0, "answers": [[[-1.5, True], [-2.0, False]], [[-1.0, True], [-3.0, False]]]}
    }
    theirs = {
        "web": {
            "accuracy": accuracy,
            "answers": [[[likelihood, True], [-2.0, True]], [[-1.0, True], [-3.0, False]]],
        }
    }
    lines, same = bench.page({"model": "tiny"}, ["web"], ours, theirs, 1e-2)
    assert same == alike
    [row] = [line for line in lines if line.startswith("| web")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["web", "2", "4"]
    assert float(cells[5]) == pytest.approx(-1.5 - likelihood, abs=1e-3)
    assert cells[6] == "1"
