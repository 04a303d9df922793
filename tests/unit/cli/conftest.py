"""The models that commands run on, and a command that runs in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specinfer import cli
from specinfer.kernels.library import find_best
from tests.engines import write_tiny
from tests.tiny_models import write_byte_tokenizer, write_similar_llama, write_tiny_llama

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """On a new machine the first command compiles, and says so on standard error."""
    find_best()


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Options: a tiny target, a draft that often agrees with it, and a small cache."""
    folder = tmp_path / "models"
    write_tiny(folder, vocab_size=256, max_context=900)
    models = ["--model", str(folder / "target"), "--draft", str(folder / "similar")]
    return [*models, "--kv-cache-memory", "64MB"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: target, draft, other (another vocabulary); and latin1.txt."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", vocab_size=128, tokenizer=True, max_context=64)
    write_similar_llama(target, folder / "draft")
    write_tiny_llama(folder / "other", vocab_size=200, tokenizer=True)
    write_byte_tokenizer(folder / "other", 200)
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, standard output and standard error of one command line, run in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specinfer", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run
