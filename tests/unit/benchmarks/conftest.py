"""Fixtures that load scripts of benchmarks/ and write their inputs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny_models import write_similar_llama, write_tiny_llama

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Returns a function that loads a script by its name, once per test module."""
    with pytest.MonkeyPatch.context() as patch:

        def load(name: str) -> ModuleType:
            [path] = [one for one in BENCHMARKS.rglob("*.py") if one.stem == name]
            spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, spec.name, module)  # dataclasses look modules up there
            spec.loader.exec_module(module)
            return module

        yield load


@pytest.fixture
def run(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs a script with `--out page.md` and returns the lines of the page."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny tensors gain nothing from more

    def main(module: ModuleType, *options: str, status: int | None = None) -> list[str]:
        out = tmp_path / "page.md"
        monkeypatch.setattr(sys, "argv", [module.__file__, *options, "--out", str(out)])
        if status is None:
            module.main()
        else:
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == status
        return out.read_text().splitlines()

    return main


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folders of a tiny target and of a draft that often agrees with it."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(
        folder / "target", vocab_size=256, max_context=4096, eos_token_id=0, tokenizer=True
    )
    return str(target), str(write_similar_llama(target, folder / "draft", noise=0.1))


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A file of three prompts with references."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"What is {n}?", "reference": f"{n} is a number."} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
