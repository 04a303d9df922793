"""Token counts, and log-probabilities in the formats of OpenAI's endpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures
from specinfer.serve.api.reports import ChatLogprobs, Tally
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import TEMPLATE
from tests.tiny_models import write_byte_tokenizer
from tests.unit.serve.asked import Asked, chunks
from tests.unit.tokenizer.made_up import write_folder


def logged(tokenizer: Tokenizer, *deltas: tuple[str, Sequence[int]], **last: Any) -> list[list[int]]:
    """The bytes of the tokens of these deltas, a list for each delta."""
    shape, found = ChatLogprobs(2, tokenizer, (256,)), []
    for number, (text, ids) in enumerate(deltas, start=1):
        reported = tuple({token: Logprob(-0.5, 1, tokenizer.text_of(token))} for token in ids)
        end = last if number == len(deltas) else {}
        entries = shape.add(Delta("", text, tuple(ids), reported, **end))
        found.append([byte for entry in entries for byte in entry["bytes"]])
    return found


def test_joined_bytes_are_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))  # 256 bytes, <s>, </s>
    stop: dict[str, Any] = {"finish_reason": FinishReason.STOP}
    e_acute = "\u00e9".encode()
    for deltas, expected in (
        ([("Hi", [72, 105, 257])], [b"Hi"]),  # the token that ends the text is not in it
        ([("H", [72, 257]), ("i", [105])], [b"H", b"i"]),  # nor is a hidden one
        ([("<s>H", [256, 72])], [b"H"]),  # nor one that only the parser of the answer sees
        ([("H", [72, 10]), ("", [10])], [b"H", b""]),  # a stop string of two line breaks
        ([("H", [72, 10]), ("\ni", [105])], [b"H", b"\ni"]),  # only its beginning
        ([("", e_acute[:1]), ("\u00e9", e_acute[1:])], [b"", e_acute]),
        ([("a", [97, *e_acute])], [b"a"]),  # a stop string that is a character of two bytes
        ([("a\ufffd", [97, 0xC3])], [b"a\xc3"]),  # cut in a character
        ([("", [300])], [b""]),  # a padding row without a token
    ):
        assert logged(tokenizer, *deltas, **stop) == [list(one) for one in expected], deltas
    of_token = {72: Logprob(-0.5, 1, "H"), 257: Logprob(-1.0, 2, "</s>")}
    [entry] = ChatLogprobs(2, tokenizer, ()).add(Delta("", "H", (72,), (of_token,), **stop))
    assert [one["bytes"] for one in entry["top_logprobs"]] == [[72], []]


def test_a_token_that_is_half_in_the_text_has_half_its_bytes(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 256)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    # The characters that stand for the bytes of ab, e acute, c.
    content["model"]["vocab"]["ab\u00c3\u00a9c"] = 256
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("", "a", "ab", "ab\u00e9", "ab\u00e9c"):
        [found] = logged(tokenizer, (text, [256]), finish_reason=FinishReason.STOP)
        assert bytes(found).decode() == text


def test_a_final_token_without_text_is_a_separate_chunk(tmp_path: Path) -> None:
    """Some clients take a chunk's tokens for its text, which would have `</s>` in it."""
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    reported = ({72: Logprob(-0.5, 1, "H")}, {105: Logprob(-0.5, 1, "i")}, {257: Logprob(-0.5, 1, "</s>")})
    ids, stop = (72, 105, 257), FinishReason.STOP
    answer = Delta("", "Hi", ids, reported, finish_reason=stop, figures=SpeculationFigures())

    server = Asked(Tokenizer.load(folder), [answer])
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    streamed = server.http.post("/chat/completions", json=body | {"stream": True})
    choices = [chunk["choices"][0] for chunk in chunks(streamed)]
    assert [
        (one["delta"].get("content"), [t["token"] for t in one["logprobs"]["content"]], one["finish_reason"])
        for one in choices
    ] == [("Hi", ["H", "i"], None), (None, ["</s>"], "stop")]
    [whole] = server.ok("/chat/completions", **body)["choices"]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Hi", "stop")
    assert [t["token"] for t in whole["logprobs"]["content"]] == ["H", "i", "</s>"]


def test_cached_tokens_of_each_prompt_are_counted_once() -> None:
    tally = Tally(30, n=2)
    for number, cached in ((0, 4), (1, 16), (2, 0), (3, 16), (2, 8), (0, 4)):
        tally.add(Delta("", token_ids=(1,), cached_tokens=cached), number)
    assert tally.usage()["prompt_tokens_details"] == {"cached_tokens": 12}
    assert tally.usage()["total_tokens"] == 36
