"""The chat command: a conversation, its commands and its end; and the conversation of the demo."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specinfer import LLM, SamplingParams
from specinfer.cli import demo
from specinfer.cli.options import DEFAULT_MODEL
from specinfer.engine.engine import Engine
from specinfer.hub.catalogue import SHIPPED_HEADS
from specinfer.request import RequestOutput
from tests.unit.cli.conftest import Run


def write_template(folder: Path) -> None:
    """Give a model a chat template that writes one message per line."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def type_in(monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
    """Answer the command's prompts with these lines, and then with Ctrl-D."""
    lines = iter(typed)

    def ask(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", ask)


def test_chat_needs_a_template_and_suggests_generate(models: Path, run: Run) -> None:
    status, _, err = run("chat", "-m", models / "target")
    assert status == 2
    assert "no chat template; use `specinfer generate --raw`" in err


def test_chat_remembers_and_obeys_commands(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_template(models / "draft")
    said = ("ab", "/stats", "ab", "/reset", "/help", "x" * 60, "x" * 80, "/exit", "not read")
    type_in(monkeypatch, *said)
    asked: list[list[str]] = []
    stream_chat = LLM.stream_chat

    def listen(self: LLM, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        asked.append([message["role"] for message in messages])
        return stream_chat(self, messages, params)

    monkeypatch.setattr(LLM, "stream_chat", listen)
    chat = ["chat", "-m", models / "draft", "--max-tokens", 4, "--ignore-eos", "--system", "s"]
    status, _, err = run(*chat, "--reasoning-budget", 3)
    assert status == 0
    assert "--reasoning-budget has no effect: the model does not reason" in err
    first = ["system", "user"]
    assert asked == [first, [*first, "assistant", "user"], first, [*first, "assistant", "user"]]
    assert "4 tokens" in err
    assert "[cut at 4 tokens; --max-tokens allows more]" in err
    assert "[the context of 64 tokens is full; /reset starts anew]" in err  # the long question left no room
    assert "the conversation is forgotten" in err
    assert "or /reset to start over" in err  # the question that did not fit


def test_ctrl_c_stops_the_answer_alone(models: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_template(models / "draft")
    type_in(monkeypatch, "ab", "cd")
    steps = iter([*[False] * 7, True])  # an interrupt comes in the eighth step
    step = Engine.step

    def interrupted(self: Engine) -> list[RequestOutput]:
        if next(steps, False):
            time.sleep(0.1)  # the main thread prints the first tokens
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    chat = ["chat", "-m", models / "draft", "--max-tokens", 20, "--ignore-eos", "--no-lookup"]
    status, out, err = run(*chat)
    assert status == 0
    first, rest = out.split(" [stopped]\n")
    assert first
    assert rest.strip("\n")
    assert "Traceback" not in err


QUESTION = demo.PROMPTS[0]


def test_the_head_is_the_default_models() -> None:
    assert SHIPPED_HEADS[demo.HEAD] == DEFAULT_MODEL


def test_no_round_finds_its_answer_in_the_round_before() -> None:
    salts = list[str | None]()

    class Recorder:
        def stream_chat(self, messages: object, params: SamplingParams) -> list[object]:
            salts.append(params.cache_salt)
            return ["an answer"]

    for _ in range(3):
        demo.answer(Recorder(), QUESTION)  # type: ignore[arg-type]
    assert None not in salts
    assert len({*salts}) == 3
