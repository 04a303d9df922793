"""Log-probabilities in the shapes of OpenAI's endpoints."""

from __future__ import annotations

from pathlib import Path

from specinfer.request import Logprob
from specinfer.serve.reported_logprobs import chat_logprobs
from specinfer.tokenizer import Tokenizer
from tests.unit.tokenizer.made_up import write_folder


def test_bytes_are_those_of_the_token_and_of_a_special_ones_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))  # 256 bytes, <s>, </s>
    of_tokens = [
        {257: Logprob(-0.5, 1, "</s>"), 65: Logprob(-1.0, 2, "A")},
        {0xC3: Logprob(-0.5, 1, "\ufffd")},
        {300: Logprob(-0.5, 1, "")},  # a padding row, which is no token
    ]
    told = chat_logprobs(of_tokens, 2, tokenizer)
    assert [one["bytes"] for one in told] == [list(b"</s>"), [0xC3], []]
    assert [one["bytes"] for one in told[0]["top_logprobs"]] == [list(b"</s>"), [65]]
    # What grammars and decoding read of it stays empty.
    assert tokenizer.token_bytes[257] == b""
    assert tokenizer.decode([65, 257]) == "A"
