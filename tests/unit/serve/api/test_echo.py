"""Prompts that are returned with the log-probabilities of their tokens, for evaluation harnesses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM
from specinfer.check.difference import PlainTarget
from specinfer.request import Logprob
from specinfer.serve.api.reports import CompletionLogprobs
from specinfer.tokenizer import Tokenizer
from specinfer.verify.logprobs import raw_logprobs
from tests.served import Served
from tests.tiny_models import write_byte_tokenizer
from tests.unit.serve.asked import chunks
from tests.unit.tokenizer.made_up import write_folder

pytestmark = pytest.mark.thorough

PROMPTS = [list(b"one two one two"), list(b"x"), list("née".encode())]
# Request of lm-evaluation-harness' local-completions for log-likelihoods.
HARNESS: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[PlainTarget]:
    with LLM(folder, lookup=False, dtype="float32", kv_cache_memory=1 << 24) as llm:
        yield PlainTarget(llm.models.target)


def expected(alone: PlainTarget, prompt: list[int]) -> list[tuple[float, float]]:
    """How likely each token behind the first is in one plain pass, and how likely the likeliest is there."""
    if len(prompt) == 1:
        return []
    rows = [raw_logprobs(row) for row in alone.logits_along(prompt[:-1], 1)]
    return [(float(row[token]), float(row.max())) for row, token in zip(rows, prompt[1:], strict=True)]


def check(reported: dict[str, Any], alone: PlainTarget, prompt: list[int], more: int) -> None:
    assert all(len(values) == len(prompt) + more for values in reported.values())
    assert (reported["token_logprobs"][0], reported["top_logprobs"][0]) == (None, None)
    for place, (chosen, most) in enumerate(expected(alone, prompt), start=1):
        assert reported["token_logprobs"][place] == pytest.approx(chosen, abs=1e-4)
        [likeliest] = reported["top_logprobs"][place].values()
        assert likeliest == pytest.approx(most, abs=1e-4)
        if chosen == most:  # the harness compares the two to see whether a text is greedy
            assert reported["token_logprobs"][place] == likeliest


def test_a_batch_of_token_ids_is_scored_as_a_plain_pass_scores_it(served: Served, alone: PlainTarget) -> None:
    for max_tokens in (0, 1):
        answer = served.post("/v1/completions", HARNESS | {"prompt": PROMPTS, "max_tokens": max_tokens})
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for choice, prompt in zip(choices, PROMPTS, strict=True):
            check(choice["logprobs"], alone, prompt, more=max_tokens)
            assert choice["text"].startswith(bytes(prompt).decode())
            assert choice["finish_reason"] == "length"
            assert "prompt_logprobs" not in choice
        assert answer.json()["usage"]["completion_tokens"] == 3 * max_tokens
        assert choices[2]["logprobs"]["text_offset"][:4] == [0, 1, 2, 2]  # the second byte of a character
        assert choices[0]["logprobs"]["tokens"][:3] == ["o", "n", "e"]


def test_a_stream_has_the_same(served: Served) -> None:
    body = HARNESS | {"prompt": PROMPTS, "max_tokens": 5, "temperature": 1}
    whole = served.post("/v1/completions", body).json()["choices"]
    streamed: dict[int, dict[str, Any]] = {}
    events = chunks(served.post("/v1/completions", body | {"stream": True}))
    for piece in (choice for event in events for choice in event["choices"]):
        choice = streamed.setdefault(piece["index"], piece)
        if choice is not piece:
            choice["text"] += piece["text"]
            for name, values in piece["logprobs"].items():
                choice["logprobs"][name] += values
    for name in ("text", "logprobs"):
        assert [streamed[number][name] for number in range(3)] == [choice[name] for choice in whole]
    refused = served.post("/v1/completions", body | {"n": 2}).json()["error"]
    assert refused["param"] == "n"
    assert "n is 2 with echo and logprobs; allowed there: 1" in refused["message"]


def test_prompt_logprobs_have_the_requested_number(served: Served) -> None:
    body = HARNESS | {"prompt": PROMPTS[0], "max_tokens": 0, "logprobs": 4, "prompt_logprobs": 1}
    [choice] = served.post("/v1/completions", body).json()["choices"]
    # Tokens that are written alike, as parts of characters are, have one entry.
    assert max(len(one) for one in choice["logprobs"]["top_logprobs"][1:]) == 4
    assert all(len(one) in (1, 2) for one in choice["prompt_logprobs"][1:])
    [other] = served.post("/v1/completions", body | {"prompt_logprobs": 5}).json()["choices"]
    assert other["logprobs"] == choice["logprobs"]
    assert all(len(one) in (5, 6) for one in other["prompt_logprobs"][1:])


def test_zero_tokens_are_allowed_without_echo_and_in_a_conversation(served: Served) -> None:
    [choice] = served.post("/v1/completions", {"prompt": "ab", "max_tokens": 0}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0, "prompt_logprobs": 1}
    [choice] = served.post("/v1/chat/completions", body).json()["choices"]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) > 10
    events = served.post("/v1/chat/completions", body | {"stream": True}).text
    assert events.count('"prompt_logprobs"') == 1
    served.wait_idle()


def test_offsets_are_places_in_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    ids = [*tokenizer.encode("<s>", add_special=False), *"aéb".encode()]
    shape = CompletionLogprobs(1, tokenizer)
    first = shape.add(ids[:3], [None, {ids[1]: Logprob(-1.0, 1, "a")}, {ids[2]: Logprob(-2.0, 1, "\ufffd")}])
    assert first["text_offset"] == [0, 0, 1]  # a special token is no text
    assert first["tokens"] == ["<s>", "a", "\ufffd"]
    assert shape.add(ids[3:], [None, None])["text_offset"] == [2, 2]


def test_the_likelier_of_tokens_with_equal_text_is_reported(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 256)
    shape = CompletionLogprobs(3, Tokenizer.load(tmp_path))
    likeliest = {200: Logprob(-1.0, 1, "\ufffd"), 201: Logprob(-3.0, 2, "\ufffd")}
    assert shape.add([200], [likeliest])["top_logprobs"] == [{"\ufffd": -1.0}]
