"""What is promised of a text that is made again, by device, verifier and sampling."""

from __future__ import annotations

import pytest
import torch

from specinfer.check.verdict import TextPromise, text_promise
from specinfer.sampling_params import SamplingParams
from specinfer.tree.draw import Verifier

IDENTICAL, ROUNDING, LAW = TextPromise.IDENTICAL, TextPromise.ROUNDING, TextPromise.LAW


@pytest.mark.parametrize(
    ("device", "verifier", "temperature", "promised"),
    [
        ("cpu", "coupled", 0.0, IDENTICAL),
        ("cpu", "coupled", 1.0, IDENTICAL),
        ("cpu", "mss", 0.0, IDENTICAL),
        ("cpu", "mss", 1.0, LAW),
        ("cuda", "coupled", 0.0, ROUNDING),
        ("cuda:1", "coupled", 1.0, ROUNDING),
        ("cuda", "mss", 0.0, ROUNDING),
        ("cuda", "mss", 1.0, LAW),
    ],
)
def test_what_is_promised_where(
    device: str, verifier: Verifier, temperature: float, promised: TextPromise
) -> None:
    params = SamplingParams(temperature=temperature)
    assert text_promise(params, verifier, torch.device(device)) is promised
