"""Prompts of a run: bad lines are skipped, and the split depends only on the content."""

import json
from pathlib import Path

from specinfer.tune.prompts import HELD_OUT, read_prompts, read_traffic
from tests.unit.tune.conftest import write_prompts


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "one"}\nno JSON\n\n{"prompt": 3}\n\xff\n{"turns": ["two", "and?"]}\n[]\n')
    found = read_prompts([path])
    assert {one.content for one in found.prompts} == {"one", "two"}
    lines = [fault.removeprefix(f"{path} line ").partition(":")[0] for fault in found.faults]
    assert lines == ["2", "4", "5", "7"]


def test_whether_a_prompt_is_held_out_depends_on_it_alone(tmp_path: Path) -> None:
    texts = [f"question {n}" for n in range(400)]
    whole = read_prompts([write_prompts(tmp_path, texts)])
    some = read_prompts([write_prompts(tmp_path, texts[::-2])])
    held_out = {one.content for one in whole.prompts if one.held_out}
    assert {one.content for one in some.prompts if one.held_out} == held_out & set(texts[::-2])
    assert 0.5 * 400 / HELD_OUT < len(held_out) < 2 * 400 / HELD_OUT
    assert [one for one in whole.prompts if one in some.prompts] == list(some.prompts)


def test_temperatures_are_mixed_and_held_out_answers_are_greedy(tmp_path: Path) -> None:
    prompts = read_prompts([write_prompts(tmp_path, [f"question {n}" for n in range(300)])]).prompts
    assert {one.temperature for one in prompts if one.held_out} == {0.0}
    counts = [sum(one.temperature == t for one in prompts if not one.held_out) for t in (0.0, 0.7, 1.0)]
    assert min(counts) > 60


def test_traffic_is_read_once_each_and_of_this_target(tmp_path: Path) -> None:
    log = tmp_path / "traffic.jsonl"
    rows: list[object] = [{"prompt_token_ids": ids, "text": "x"} for ids in ([1, 2], [1, 2], [3], [64], [])]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "text alone"}]))
    found = read_traffic(log, vocab=64)
    assert {one.content for one in found.prompts} == {(1, 2), (3,)}
    assert ["line 4" in found.faults[0], "below the target's 64" in found.faults[0]] == [True, True]
    assert len(found.faults) == 3
