"""The table of features that do not work together, and the configs that it refuses."""

from __future__ import annotations

from itertools import chain

import pytest

from specinfer.config import EngineConfig
from specinfer.engine.hardware import Hardware
from specinfer.errors import ConfigError
from specinfer.progress import NoProgress
from specinfer.support import REFUSED, Feature, check_support, refusal


def test_a_pair_is_refused_in_its_own_words_and_no_feature_alone() -> None:
    assert {*chain(*REFUSED)} == {*Feature}, "each feature stands in the table"
    for (one, other), sentence in REFUSED.items():
        assert refusal({other: "B", one: "A"}) == sentence.format("A", "B")
        assert ";" in sentence, "a remedy"
        with pytest.raises(ConfigError):
            check_support({one: "A", other: "B"})
    for feature in Feature:
        assert refusal({feature: "A"}) is None


def test_configs_are_refused() -> None:
    two, stages = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
    both = "with tensor_parallel 2 and pipeline_parallel 2; "
    blocks = "is 'gguf' with tensor_parallel 2; allowed there: none, int8, int4, as "
    cases: list[tuple[dict[str, object], str]] = [
        ({"prepared": False, "offload": "auto"}, "prepared is False with offload 'auto', which "),
        ({**two, "quantization": "gguf"}, f"quantization {blocks}"),
        ({**two, "draft_quantization": "gguf"}, f"draft_quantization {blocks}"),
        ({**two, "lora": ["a=x"]}, "adapters do not run with tensor_parallel 2, as "),
        ({**two, "offload": "auto"}, "offload is 'auto' with tensor_parallel 2; allowed there: never"),
        ({**two, **stages, "memory": 1 << 30}, f"memory is 1073741824 {both}"),
    ]
    for options, line in cases:
        with pytest.raises(ConfigError) as refused:
            EngineConfig.from_options("m", options)
        assert str(refused.value).startswith(line), options
    for options in ({**stages, "quantization": "gguf"}, {"offload": "auto", "memory": 1 << 30}, {**two}):
        EngineConfig.from_options("m", options)


def test_options_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    products = "quantized products run on the CPU only: use device cpu, or"
    cases: list[tuple[dict[str, object], str]] = [
        ({"quantization": "int8"}, f"quantization is 'int8' on device cuda; {products} quantization none"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2 on device cuda; allowed there: 1"),
        ({"sum_parts": 4}, "sum_parts is 4 on device cuda; allowed there: 1"),
        ({"memory": 1 << 30}, "memory limits engines on a CPU, and the device is cuda; leave it out"),
    ]
    for options, line in cases:
        with pytest.raises(ConfigError) as refused:
            Hardware.of(EngineConfig.from_options("m", {"device": "cuda", **options}), NoProgress())
        assert str(refused.value) == line, options
    Hardware.of(EngineConfig.from_options("m", {"device": "cuda", "offload": "auto"}), NoProgress())
