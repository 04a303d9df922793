"""benchmarks/head_recipes: prompts that are of our own, and the same every time; cards of heads."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "head_recipes"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded("prompts")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"head_recipes_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_there_are_many_different_prompts_of_every_kind_the_same_every_time(module: ModuleType) -> None:
    rows = list(module.chat())
    assert rows == list(module.chat())
    texts = {row["prompt"] for row in rows}
    assert len(texts) == len(rows) >= 4000
    assert not any("{" in text or "  " in text for text in texts)
    kinds = [row["category"] for row in rows]
    assert len(set(kinds)) == 10
    assert min(kinds.count(kind) for kind in set(kinds)) >= 60


def test_functions_are_asked_for_in_every_form(module: ModuleType) -> None:
    texts = [row["prompt"] for row in module.code()]
    assert texts == [row["prompt"] for row in module.code()]
    assert len(set(texts)) == len(texts) == 8 * 60
    assert texts[0] == (
        "from typing import Dict, List\n\n"
        "def words_by_length(text: str) -> Dict[int, List[str]]:\n"
        '    """ Group the words of a text by their length, in the order in which they stand.\n'
        "    >>> words_by_length('a bee sat on a red hat')\n"
        "    {1: ['a', 'a'], 3: ['bee', 'sat', 'red', 'hat'], 2: ['on']}\n"
        '    """\n'
    )
    assert "def coin_change(amount, coins):" in texts[2 * 60 + 47]


def test_stubs_of_functions_are_python(module: ModuleType) -> None:
    for row in list(module.code())[: 3 * 60]:
        exec(compile(row["prompt"], "stub", "exec"), {})  # its annotations are evaluated


def test_what_a_function_gives_is_true_of_its_type(module: ModuleType) -> None:
    kinds = {"str": str, "int": int, "bool": bool, "float": float, "Dict": dict, "List": list}
    for name, _, result, _, call, gives in module._read("code.json"):
        assert call.startswith(f"{name}(")
        kind = kinds.get(result.split("[")[0])
        assert kind is None or type(ast.literal_eval(gives)) is kind, name


def test_ours_stand_among_the_others(module: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in range(5)))
    found = [row["prompt"] for row in module.rows("code", [str(file)])]
    assert [found.index(str(number)) for number in range(5)] == [1, 2, 4, 5, 7]
    assert len(found) == 8 * 60 + 5
    with pytest.raises(SystemExit, match="allowed: chat, code"):
        list(module.rows("poems", []))


def test_of_other_files_short_prompts_are_taken(module: ModuleType, tmp_path: Path) -> None:
    texts = ["short", "x" * (module.LONGEST - 1), "x" * module.LONGEST]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts))
    assert list(module.short([str(file)])) == [{"prompt": text} for text in texts[:2]]


def test_a_card_adds_the_training_data_of_the_initial_head(tmp_path: Path) -> None:
    def card(folder: str, learnt: str) -> Path:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").write_text(
            f"--draft x\n| training data | {learnt} |\n| made | now |\n"
        )
        return tmp_path / folder

    pack = loaded("pack")
    tuned = card("tuned", "20 answers of the target, 500 tokens; prompts: prompts.jsonl")
    assert "| 20 answers of the target, 500 tokens; prompts: prompts.jsonl |\n| made" in pack.card_of(
        tuned, 3, None
    )
    for folder, learnt in (
        ("first", "7 answers of the target, 120 tokens; prompts: prompts.jsonl"),
        ("second", "2 answers of the target, 20 tokens; prompts: a.jsonl; earlier: 100 other tokens"),
    ):
        found = pack.card_of(tuned, 3, card(folder, learnt))
        assert "500 tokens; prompts: prompts.jsonl; earlier: 120 other tokens |" in found
        assert f"smollm2.sh`, seed 3, which continued the previous `{folder}`." in found
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "README.md").write_text("a head")
    with pytest.raises(SystemExit, match="has no row 'training data'"):
        pack.card_of(tuned, 3, tmp_path / "none")
