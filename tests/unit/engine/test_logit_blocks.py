"""Logits in tiny blocks, few of them in memory: the output is that with full rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.request import RequestOutput
from specinfer.runtime import flight as flight_module
from specinfer.runtime.flight import Flight
from tests.engines import Tiny

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], list(range(5, 30)), [7, 7, 7, 7]]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1, "top_p": 0.95, "seed": 3},
    "processed": {"temperature": 0.9, "presence_penalty": 0.6, "bad_words": [], "min_tokens": 3, "seed": 4},
    "logprobs": {"temperature": 1, "seed": 5, "logprobs": 2, "prompt_logprobs": 1},
}


def said(tiny: Tiny, verifier: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    llm = tiny.llm(["similar", "stranger"], expansion=(3, 2), lookup=True, verifier=verifier)
    outputs: list[RequestOutput] = llm.generate(PROMPTS, SamplingParams(**params, max_tokens=10))
    llm.check_integrity()
    return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("verifier", ["coupled", "mss"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_texts_and_logprobs_do_not_depend_on_blocks(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], verifier: str
) -> None:
    want, make = said(tiny, verifier, params), Flight._make
    made: list[int] = []

    def counted(self: Flight, wanted: Any) -> None:
        make(self, wanted)
        made.append(self._count if self._whole is not None else len(self._blocks[-1].rows))

    monkeypatch.setattr(Flight, "_make", torch.inference_mode()(counted))
    monkeypatch.setattr(flight_module, "BLOCK_ROWS", 2)
    monkeypatch.setattr(flight_module, "_MIN_ROWS_BESIDE", 2)
    for most_rows in (1, 3, 20):
        made.clear()
        monkeypatch.setattr(flight_module, "MAX_BYTES", most_rows * 64 * 4)
        assert said(tiny, verifier, params) == want, most_rows
        assert max(made) <= most_rows
        assert len(made) > 16, "many small blocks were made"
