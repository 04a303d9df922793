"""The comparison of quantized models' perplexities, on a model of nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture
def run(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], list[str]]:
    """Runs it over three rows with a limit; returns the lines of its result."""
    bench = script("perplexity")
    model = write_tiny_llama(tmp_path / "model", tokenizer=True, vocab_size=256)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    dataset, out = tmp_path / "rows.jsonl", tmp_path / "result.md"
    rows = [{"prompt": f"What is {n}?", "reference": f"{n} is a number."} for n in range(3)]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))  # quantized matrices are kept there
    monkeypatch.setenv("CXX", "no-such-compiler")  # and no kernels built

    def main(limit: int) -> list[str]:
        options = ["--model", str(model), "--dataset", str(dataset), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["perplexity.py", *options, "--limit", str(limit)])
        bench.main()
        return out.read_text().splitlines()

    return main


def test_it_goes_on_where_it_was_and_ends_with_the_rows_there_are(
    run: Callable[[int], list[str]], tmp_path: Path
) -> None:
    kept = tmp_path / "result.json"
    run(1)
    [first] = list(json.loads(kept.read_text())["cells"].values())
    lines = run(200)
    rows = list(json.loads(kept.read_text())["cells"].values())
    assert rows[0] == first
    assert [row["tokens"] for row in rows] == 3 * [len("0 is a number.")]
    assert run(200) == lines
    assert len(json.loads(kept.read_text())["cells"]) == 3
