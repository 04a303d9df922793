"""Commands with --lora: all of their requests have the adapter."""

import json
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, LoRARequest, SamplingParams
from specinfer.engine.admission import Admission, AdmittedRequest
from specinfer.request import Request
from tests.adapters import write_adapter
from tests.unit.cli.conftest import Run
from tests.unit.cli.test_chat import type_in, write_template

SHORT = ("--max-tokens", "12", "--ignore-eos", "--temperature", "0")


@pytest.fixture
def adapter(pair: list[str], tmp_path: Path) -> Path:
    """The folder of an adapter of the target of `pair`."""
    return write_adapter(tmp_path / "sql", Path(pair[1]))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of the adapters of all requests of a command."""
    names: list[str | None] = []
    admit = Admission.admit

    def note(self: Admission, request: Request, *arguments: Any, **more: Any) -> AdmittedRequest:
        names.append(request.adapter)
        return admit(self, request, *arguments, **more)

    monkeypatch.setattr(Admission, "admit", note)
    return names


def test_generate_writes_the_text_of_the_adapter(pair: list[str], adapter: Path, run: Run) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(pair[1], kv_cache_memory="64MB") as llm:
        plain, adapted = (
            llm.generate(["ab"], params, lora_request=lora)[0].text
            for lora in (None, LoRARequest("sql", 1, adapter))
        )
    assert plain != adapted
    for options, text in (([], plain), (["--lora", f"sql={adapter}"], adapted)):
        status, out, err = run("generate", "ab", *pair, *SHORT, *options)
        assert status == 0, err
        assert out == f"{text}\n"
    assert "target: adapters take up to" in err


def test_every_request_of_a_command_has_the_adapter(
    pair: list[str], adapter: Path, used: list[str | None], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_template(Path(pair[1]))
    type_in(monkeypatch, "ab", "cd", "/exit")
    status, _, err = run("chat", *pair, *SHORT, "--lora", f"sql={adapter}")
    assert status == 0, err
    assert used == ["sql", "sql"]
    used.clear()
    options = ("--limit", "2", "--max-tokens", "6", "--json", "-")
    status, out, err = run("bench", *pair, *options, "--lora", f"sql={adapter}")
    assert status == 0, err
    assert {*used} == {"sql"}
    assert json.loads(out)["options"]["lora"] == ["sql"]


def test_an_adapter_that_cannot_be_used_is_refused(pair: list[str], adapter: Path, run: Run) -> None:
    both = ("--lora", f"sql={adapter}", "--lora", f"other={adapter}")
    for words in (("generate", "ab"), ("chat",), ("bench",), ("check",)):
        for told, loras in (
            ("--lora names sql, other; allowed here: one adapter", both),
            ("lora is 'sql'; allowed: NAME=FOLDER", ("--lora", "sql")),
        ):
            status, _, err = run(*words, *pair, *loras)
            assert status == 2
            line = err.strip().splitlines()[-1]
            assert line.startswith("specinfer: error: ")
            assert told in line
