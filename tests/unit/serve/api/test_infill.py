"""Fill-in-the-middle: POST /infill, and suffix at /v1/completions."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken

from specinfer.request import FinishReason
from specinfer.serve.api.infill import Infill, InfillFields
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import MODEL, ScriptedBackend, byte_tokenizer, says, scripted_service
from tests.unit.serve.asked import Asked, chunks

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and four that fill in."""
    folder = tmp_path_factory.mktemp("filling")
    byte_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


class Filling(Asked):
    """A server, a client, and the prompts that the engine got."""

    def post(self, **body: Any) -> httpx.Response:
        usual = {"input_prefix": "a = ", "input_suffix": "\nprint(a)"}
        return self.http.post("http://server/infill", json=usual | body)


def test_an_infill_in_one_piece_has_these_fields(tokenizer: Tokenizer) -> None:
    server = Filling(tokenizer, says("1", "2", cached_tokens=4))
    answer = server.post(n_predict=8, seed=1, cache_prompt=True, id_slot=-1).json()
    assert answer.pop("metrics")["speculative_decoding"]["num_spec_steps"] == 0
    timings = answer.pop("timings")
    assert answer == {
        **{"index": 0, "content": "12", "tokens": [], "has_new_line": False, "truncated": False},
        **{"stop": True, "stop_type": "eos", "stopping_word": "", "model": MODEL},
        **{"tokens_predicted": 2, "tokens_evaluated": 16, "tokens_cached": 4},
    }
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (4, 12, 2)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (0, 0)
    assert server.prompts == ["<|fim_prefix|>a = <|fim_suffix|>\nprint(a)<|fim_middle|>"]
    params = server.backend.works[0].params
    assert (params.max_tokens, params.seed, params.stop_token_ids) == (8, 1, (256, 257, 258, 259))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)


def test_a_stream_ends_with_the_counts(tokenizer: Tokenizer) -> None:
    server = Filling(tokenizer, says("1", "2", stopped_by="\n"))
    *pieces, last = chunks(server.post(stream=True, stop=["\n"], return_tokens=True))
    counts = {"tokens_evaluated": 16}
    assert pieces == [
        {"index": 0, "content": "1", "tokens": [49], "stop": False, "tokens_predicted": 1} | counts,
        {"index": 0, "content": "2", "tokens": [50], "stop": False, "tokens_predicted": 2} | counts,
    ]
    assert (last["content"], last["stop"]) == ("", True)
    assert (last["stop_type"], last["stopping_word"]) == ("word", "\n")


def test_the_cursors_line_and_other_files_are_read(tokenizer: Tokenizer) -> None:
    files = [{"filename": "one.py", "text": "A = 1\n"}, {"text": "B = 2\n", "time": 5}]
    server = Filling(tokenizer, says("1"))
    answer = server.post(prompt="f(", input_extra=files)
    assert answer.status_code == 200
    assert server.prompts == [
        "<|file_sep|>one.py\nA = 1\n<|file_sep|>filename\nB = 2\n<|file_sep|>filename\n"
        "<|fim_prefix|>a = f(<|fim_suffix|>\nprint(a)<|fim_middle|>"
    ]
    many = [{"filename": f"{i}.py", "text": "x" * 40_000} for i in range(5)]
    server.post(input_extra=many)
    assert server.prompts[1].startswith("<|file_sep|>3.py\n")  # two of them leave room for an answer


def test_an_answer_ends_where_the_editor_wants_it(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "x\n    y\n  z\nw\n", "eos"),
        ({"n_indent": 4}, "x\n    y\n  ", "limit"),
        ({"n_indent": 1}, "x\n    y\n  z\n", "limit"),
        ({"n_predict": 0}, "", "limit"),
    ]
    for body, content, stop_type in cases:
        server = Filling(tokenizer, says("x\n ", "   y", "\n  ", "z\nw", "\n"))
        answer = server.post(**body).json()
        assert (answer["content"], answer["stop_type"]) == (content, stop_type), (body, content)
        pieces = chunks(server.post(**body, stream=True))
        assert "".join(piece["content"] for piece in pieces) == content, (body, content)
        stopped = stop_type == "limit"  # before the engine had ended
        assert server.backend.gone == [work.id for work in server.backend.works if stopped], (body, content)


def test_an_answer_ends_with_a_line_when_its_time_is_over(tokenizer: Tokenizer) -> None:
    script = says("x", "y\n", "z", "w")

    async def run() -> str:
        service = scripted_service(tokenizer, ScriptedBackend(script))
        fields = InfillFields(input_prefix="", input_suffix="", t_max_predict_ms=100)
        # A second between two looks at the clock.
        infill = Infill(service, fields, clock=itertools.count().__next__)
        return str((await infill.whole())["content"])

    assert asyncio.run(run()) == "xy\n"


def test_samplers_that_are_not_listed_are_off(tokenizer: Tokenizer) -> None:
    cases: list[tuple[list[str] | None, tuple[float, ...]]] = [
        (["top_k", "top_p", "infill"], (1.0, 5, 0.95, 0.0)),
        (["temperature"], (0.8, 0, 1.0, 0.0)),
        (None, (0.8, 5, 0.95, 0.05)),
    ]
    for samplers, chosen in cases:
        server = Filling(tokenizer, says("1"))
        server.post(top_k=5, samplers=samplers)
        params = server.backend.works[0].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == chosen, samplers


def test_an_answer_has_the_requested_fields_and_what_ended_it(tokenizer: Tokenizer) -> None:
    server = Filling(tokenizer, says("1", reason=FinishReason.LENGTH))
    assert server.post(n_predict=1).json()["stop_type"] == "limit"
    answer = server.post(response_fields=["content", "timings/prompt_n", "nothing/there"])
    assert answer.json() == {"content": "1", "prompt_n": 16}


def test_unsupported_values_are_refused(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_suffix": None}, "input_suffix"),
        ({"n_predict": 5, "max_tokens": 9}, "n_predict"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"input_prefix": "x" * 7_000_000}, "input_suffix"),
        ({"input_prefix": "x" * 100_000}, "input_prefix"),
    ]
    for body, param in cases:
        server = Filling(tokenizer, says("1"))
        answer = server.post(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    refused = server.post(trace=True).json()["error"]
    assert (refused["param"], "/v1/completions" in refused["message"]) == ("trace", True)


def test_a_file_that_cannot_fit_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = Tokenizer.encode_behind

    def counted(self: Tokenizer, text: str) -> list[int]:
        read.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode_behind", counted)
    server = Filling(tokenizer, says("1"))
    extra = [{"text": "x" * 7_000_000}, {"text": "y" * 30}]
    assert server.post(input_extra=extra).status_code == 200
    assert "y" * 30 in server.prompts[0]
    assert max(read) < 1000


def test_completions_take_a_suffix(tokenizer: Tokenizer) -> None:
    server = Filling(tokenizer, says("1"), says("2"))
    body = {"prompt": ["a = ", "b = "], "suffix": "\nprint()", "stop_token_ids": [7]}
    answer = server.http.post("/completions", json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["1", "2"]
    asked = [f"<|fim_prefix|>{name} = <|fim_suffix|>\nprint()<|fim_middle|>" for name in "ab"]
    assert server.prompts == asked
    assert server.backend.works[0].params.stop_token_ids == (7, 256, 257, 258, 259)
    server.http.post("/completions", json={"prompt": "a", "suffix": ""})
    assert server.prompts[-1] == "a"
    for body, param in (({"prompt": [1, 2]}, "prompt"), ({"prompt": "a", "echo": True}, "echo")):
        assert server.refused("/completions", **{"suffix": "b"} | body)[:2] == (400, param)


def test_a_model_without_fill_in_tokens_is_refused(tmp_path: Path) -> None:
    server = Filling(byte_tokenizer(tmp_path), says("1"))
    status, param, message = server.refused("/completions", prompt="a", suffix="b")
    assert (status, param) == (400, "suffix")
    assert "looked for <|fim_prefix|>, <fim_prefix>" in message
    assert server.post().json()["error"]["param"] == "input_suffix"
    assert server.backend.works == []
