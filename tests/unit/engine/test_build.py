"""Measurements, checks and choices while an engine is built."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import EngineConfig
from specinfer.engine.build import build_engine, resolved
from specinfer.engine.models import load_models, variant_models
from specinfer.errors import ConfigError
from specinfer.hub import gguf_header
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tokenizer import Tokenizer, gguf_vocabulary
from tests.engines import ENGINE
from tests.kernels import kernels
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_pair, write_tiny_llama
from tests.unit.engine.offloading import noted_needs


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(str(model), {**ENGINE, "kernels": "torch", **options})


def test_heads_that_native_attention_cannot_serve_run_in_pytorch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native, shape = kernels("native"), {"hidden_size": 520, "num_heads": 1, "num_kv_heads": 1}
    large = write_tiny_llama(tmp_path / "large", num_layers=1, tokenizer=True, **shape)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        models = load_models(config(large, kernels="auto"))
    assert isinstance(models.target.kernels.attention, SdpaAttention)
    assert type(models.target.kernels.ops) is type(native.ops), "only attention is another"
    [record] = caplog.records
    assert record.getMessage() == (
        f"native attention is not used for {large}, PyTorch runs instead: heads have 520 elements; it takes "
        "at most 512"
    )


def test_a_model_that_drafts_for_itself_needs_its_memory_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, target = noted_needs(monkeypatch), str(folder / "target")
    load_models(config(folder / "target", drafts=(target,)))
    load_models(config(folder / "target", drafts=(target,) * 2))
    assert [len(needs.draft_weights) for needs in noted] == [1, 2]
    assert len({size for needs in noted for size in (needs.weights, *needs.draft_weights.values())}) == 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The files whose heads were parsed, and those whose tokenizers were built."""
    done: dict[str, list[str]] = {"parsed": [], "built": []}
    parse, build = gguf_header._parse, gguf_vocabulary.read_vocabulary

    def parsing(path: Path, *rest: Any) -> gguf_header.GgufHeader:
        done["parsed"].append(path.name)
        return parse(path, *rest)

    def building(header: gguf_header.GgufHeader) -> Tokenizer:
        done["built"].append(header.path.name)
        return build(header)

    monkeypatch.setattr(gguf_header, "_parse", parsing)
    monkeypatch.setattr(gguf_vocabulary, "read_vocabulary", building)
    return done


def test_a_gguf_file_is_parsed_once_and_a_draft_gets_no_tokenizer(
    tmp_path: Path, counted: dict[str, list[str]]
) -> None:
    target, first, second = (
        write_tiny_gguf(tmp_path / f"{name}.gguf", seed=seed)
        for seed, name in enumerate(("target", "first", "second"))
    )
    models = load_models(config(target, drafts=(str(first), str(second), str(first))))
    assert sorted(counted["parsed"]) == ["first.gguf", "second.gguf", "target.gguf"]
    assert counted["built"] == ["target.gguf"]
    assert list(models.drafts) == ["draft1", "draft2", "draft3"]


def test_a_draft_of_another_vocabulary_brings_its_tokenizer(
    tmp_path: Path, counted: dict[str, list[str]]
) -> None:
    target = write_tiny_gguf(tmp_path / "target.gguf")
    other = write_tiny_gguf(tmp_path / "other.gguf", last_token="<end>")
    models = load_models(config(target, drafts=(str(other),)))
    assert counted["built"] == ["target.gguf", "other.gguf"]
    assert len(models.foreign["draft"].logit_ids) == 96


def test_longrope_has_the_long_factors_where_a_long_context_is_asked_for(tmp_path: Path) -> None:
    """For the target and for drafts."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    more = {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": factors}
    folder = write_pair(tmp_path)
    for one in ("target", "draft"):
        path = folder / one / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    for asked, contexts in ((None, (64, 64)), (64, (64, 64)), (100, (256, 100))):
        engine = config(folder / "target", drafts=(str(folder / "draft"),), max_context=asked)
        models = load_models(engine)
        assert [model.config.max_context for model in (models.target, *models.drafts.values())] == [
            contexts[0]
        ] * 2
        assert ("rope" in models.origin) == (contexts[0] == 256), (
            "engines with other factors go on with no text"
        )
        _, built = build_engine(engine, models)
        assert built.admission.max_context == contexts[1]
    short = replace(engine, scheduler=replace(engine.scheduler, max_context=64))
    with pytest.raises(ConfigError, match=r"max_context is 64.* texts of 100 tokens \(LongRoPE\)"):
        variant_models(short, engine, models)
    assert variant_models(engine, engine, models).target is models.target


def test_auto_is_what_rows_cost(folder: Path) -> None:
    for curve, nodes, rows in (
        (CostCurve((1, 240, 480), (1.2, 1.2, 2.4)), 360, 480),  # passes that wait for their weights
        (CostCurve((1, 2), (1.0, 2.0)), 64, 128),  # every row costs what the first one does
        (CostCurve((1, 2), (1.0, 1.0)), 2048, 2048),
        (CostCurve((1, 20, 100), (1.0, 1.0, 2.0)), 64, 128),
    ):
        asked = config(folder / "target", max_nodes="auto", max_step_tokens="auto")
        found = resolved(asked, curve)
        assert (found.speculation.max_nodes, found.scheduler.max_step_tokens) == (nodes, rows), curve
        numbers = config(folder / "target", max_nodes=9, max_step_tokens=99)
        assert resolved(numbers, curve) == numbers, curve
        assert asked.speculation.node_limit == asked.scheduler.row_limit == 2048, "until it is known"
