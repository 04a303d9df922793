"""A smoke test for each script of benchmarks/, and its result pages."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import agent, faults
from benchmarks.paper.lab import DATASETS
from benchmarks.paper.question import name_of
from benchmarks.paper.questions import QUESTIONS
from benchmarks.paper.run import main as paper
from tests.served import Served
from tests.tiny_models import write_similar_llama, write_tiny_llama

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = {
    path.stem: f"benchmarks.{path.parent.name}.{path.stem}"
    for path in ROOT.glob("benchmarks/*/*.py")
    if "= Study(" in path.read_text(encoding="utf-8")
}
# Options of runs; MODEL, DRAFT and ROWS are filled in.
RUNS = {
    "peers": "--draft DRAFT --prompts ROWS --rounds 1 --max-tokens 8 --engines specinfer-bf16+draft,vllm",
    "perplexity": "--dataset ROWS --limit 2",
}
FACTS = {"peers": "not installed"}  # on the pages


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny target, a draft that often agrees with it, and three prompts with references."""
    folder = tmp_path_factory.mktemp("bench")
    shape: dict[str, Any] = {"vocab_size": 256, "max_context": 30_000, "eos_token_id": 0}
    target = write_tiny_llama(folder / "target", tokenizer=True, **shape)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "target" / "chat_template.jinja").write_text(template)
    rows = [{"prompt": f"What is {n}?", "reference": f"{n} is a number."} for n in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draft = write_similar_llama(target, folder / "draft", noise=0.1)
    return {"MODEL": str(target), "DRAFT": str(draft), "ROWS": str(folder / "rows.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_script(
    name: str, words: dict[str, str], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(SCRIPTS[name])

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *options])
        code = 0
        try:
            module.main()
        except SystemExit as ended:
            code = ended.code
        assert not code

    run("--help")
    if name not in RUNS:
        return
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from more
    monkeypatch.setenv("SPECINFER_PEERS", str(tmp_path))
    out = tmp_path / "page.md"
    options = ["--model", "MODEL", *RUNS[name].split(), "--out", str(out)]
    run(*(words.get(word, word) for word in options))
    page = out.read_text()
    assert FACTS.get(name, "| ") in page
    if name == "perplexity":  # a second run finds every cell
        monkeypatch.setattr(module, "load_models", None)
        run(*(words.get(word, word) for word in options))
        assert out.read_text() == page


@pytest.mark.slow
def test_users_of_a_server_are_measured_and_lose_no_text_to_a_killed_engine(
    words: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(module: Any, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *options])
        module.main()
        return capsys.readouterr().out

    with Served(words["MODEL"], "--max-context", "2048", "--kv-cache-memory", "64MB") as served:
        short = ["--turns", "2", "--system", "20", "--new", "5", "10"]
        assert "tokens computed: " in printed(agent, served.url, *short)
        load = ["--dataset", words["ROWS"], "--users", "2", "--minutes", "0.05", "--max-tokens", "8"]
        kill = ["--every", "1.5", "--fault", f"kill -9 {served.engine_pid}"]
        found = printed(faults, served.url, *load, *kill)
    assert re.match(r"[1-9]\d* requests, [1-9]\d* faults, 0 failed; 0 other texts ", found), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_question_of_the_paper_is_answered_by_a_page_and_a_plot_of_its_cells(
    words: dict[str, str], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SPECINFER_PEERS", str(tmp_path))
    for name in (*DATASETS.values(), "gsm8k", "humaneval", "mt_bench"):
        (tmp_path / f"{name}.jsonl").write_bytes(Path(words["ROWS"]).read_bytes())
    out = tmp_path / "paper"
    models = ["--target", words["MODEL"], "--draft", words["DRAFT"], "--small", words["MODEL"]]
    options = ["--toy", "--out", str(out), "--prompts", str(tmp_path), *models]

    def run(*more: str) -> dict[str, bytes]:
        paper([*options, *more])
        return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}

    made = run()  # in one process, as one question's models may be open for the next
    for name in map(name_of, QUESTIONS):
        assert list((out / "cells" / name).glob("*.json")), name
        assert b"\n|" in made[f"{name}.md"]
        assert b"</svg>" in made[f"{name}.svg"]
        assert f"]({name}.md)".encode() in made["index.md"]
    assert len(made) == 2 * len(QUESTIONS) + 1
    assert run("--pages") == made


@pytest.mark.thorough
def test_result_pages_are_the_newest_and_linked_by_a_document() -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md")}
    newest = {name.rpartition("_")[0]: name for name in sorted(pages)}
    assert set(newest.values()) == set(pages), "delete those that newer ones replace"
    documents = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    text = "".join([*(path.read_text(encoding="utf-8") for path in documents), *pages.values()])
    names = [path.name for path in (*RESULTS.glob("*.md"), *RESULTS.glob("*.png"))]
    left = [name for name in names if f"{name})" not in text and not name.startswith("gpu_")]
    assert left == [], "delete them, or link them"
