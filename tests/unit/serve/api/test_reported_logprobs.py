"""Log-probabilities in the formats of OpenAI's endpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures
from specinfer.serve.api.reports import chat_logprobs
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import TEMPLATE, ScriptedBackend, http_client, scripted_app
from tests.unit.tokenizer.made_up import write_folder


def test_bytes_are_those_of_the_token_and_of_a_special_ones_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))  # 256 bytes, <s>, </s>
    of_tokens = [
        {257: Logprob(-0.5, 1, "</s>"), 65: Logprob(-1.0, 2, "A")},
        {0xC3: Logprob(-0.5, 1, "\ufffd")},
        {300: Logprob(-0.5, 1, "")},  # a padding row without a token
    ]
    reported = chat_logprobs(of_tokens, 2, tokenizer)
    assert [one["bytes"] for one in reported] == [list(b"</s>"), [0xC3], []]
    assert [one["bytes"] for one in reported[0]["top_logprobs"]] == [list(b"</s>"), [65]]
    # Its bytes for grammars and decoding stay empty.
    assert tokenizer.token_bytes[257] == b""
    assert tokenizer.decode([65, 257]) == "A"


def test_a_final_token_without_text_is_a_separate_chunk(tmp_path: Path) -> None:
    """Some clients take a chunk's tokens for its text, which would have `</s>` in it."""
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    reported = ({72: Logprob(-0.5, 1, "H")}, {105: Logprob(-0.5, 1, "i")}, {257: Logprob(-0.5, 1, "</s>")})
    ids, stop = (72, 105, 257), FinishReason.STOP
    answer = Delta("", "Hi", ids, reported, finish_reason=stop, figures=SpeculationFigures())

    async def ask(**more: Any) -> str:
        app = scripted_app(Tokenizer.load(folder), ScriptedBackend([answer]))
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
        return (await http_client(app).post("/chat/completions", json=body | more)).text

    lines = asyncio.run(ask(stream=True)).split("\n\n")[:-2]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [
        (one["delta"].get("content"), [t["token"] for t in one["logprobs"]["content"]], one["finish_reason"])
        for one in choices
    ] == [("Hi", ["H", "i"], None), (None, ["</s>"], "stop")]
    [whole] = json.loads(asyncio.run(ask()))["choices"]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Hi", "stop")
    assert [t["token"] for t in whole["logprobs"]["content"]] == ["H", "i", "</s>"]
