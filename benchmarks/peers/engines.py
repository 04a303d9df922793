"""The engines of peers.py and their modes, and a model's weights in each engine's format."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

OURS: Final = "specinfer"
INSTALL: Final = "run: make peers-env"
_HERE: Final = Path(__file__).parent
_CONVERTERS: Final = {  # form -> environment, script, its command, more arguments, suffix of the result
    "safetensors": ("transformers", "run_engines.py", "to_safetensors", (), ""),
    "q8_0": ("llama_cpp", "run_llama_cpp.py", "quantize", ("Q8_0",), ".gguf"),
    "q4_0": ("llama_cpp", "run_llama_cpp.py", "quantize", ("Q4_0",), ".gguf"),
}


def script_of(engine: str) -> list[str]:
    """Return the script and argument that run an engine's child, for the Python of its environment."""
    return [str(_HERE / ("run_llama_cpp.py" if engine == "llama_cpp" else "run_engines.py")), engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine in one mode."""

    name: str
    script: str  # see script_of; also the environment's name, but for OURS
    form: str  # Home.weights has the forms
    bits: str  # precision, for the table
    plain: str  # name of the same engine without speculation
    draft: bool = False  # gets the draft model
    options: Mapping[str, Any] = field(default_factory=dict)


# specinfer: every quantization with every kind of speculation. The draft is always int4: its trees are as
# good as in bfloat16, and it does not change the text.
_QUANTIZATIONS: Final = {
    "bf16": ("bf16", {"dtype": "bfloat16", "quantization": "none"}),
    "int8": ("int8", {"dtype": "bfloat16", "quantization": "int8"}),
    "int4": ("int4, int8 activations, with AMX bf16", {"dtype": "bfloat16", "quantization": "int4"}),
}
_SPECULATION: Final[dict[str, dict[str, Any]]] = {
    "": {"lookup": False},
    "+ngram": {"lookup": True},
    "+draft": {"draft_quantization": "int4", "lookup": False},
    "+draft+ngram": {"draft_quantization": "int4", "lookup": True},
}
_FILE_BITS: Final = "the file's own, int8 activations; the default"
_NGRAM: Final = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}
_VLLM: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "+draft": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
    "+ngram": {"speculative_config": {**_NGRAM, "num_speculative_tokens": 4}},
}
# No "+draft": for draft models it reads OpenVINO's own format only, no GGUF file.
_OPENVINO: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "+lookup": {"prompt_lookup": True, "generation": {"num_assistant_tokens": 4, "max_ngram_size": 4}},
}
# Its own defaults for the assistant: up to 20 tokens, fewer when it is not confident.
_TRANSFORMERS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "+draft": {},
    "+lookup": {"prompt_lookup_num_tokens": 10},
}


def _modes(
    name: str, script: str, form: str, bits: str, modes: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterable[Engine]:
    """Return an engine in its modes: suffix of the name -> options; "+draft" gets the draft model."""
    for suffix, options in (modes or {"": {}}).items():
        own: dict[str, Any] = {"script": script, "form": form, "bits": bits, "plain": name}
        yield Engine(name=name + suffix, draft="draft" in suffix, options=options, **own)


def _engines() -> Iterable[Engine]:
    # No option at all, as beside it llama.cpp-file; and the same without speculation.
    for name, options in ((f"{OURS}-file", {"lookup": False}), (f"{OURS}-default", {})):
        own: dict[str, Any] = {"script": OURS, "form": "file", "bits": _FILE_BITS, "plain": f"{OURS}-file"}
        yield Engine(name=name, options=options, **own)
    for quantization, (bits, loading) in _QUANTIZATIONS.items():
        modes = {suffix: {**loading, **options} for suffix, options in _SPECULATION.items()}
        yield from _modes(f"{OURS}-{quantization}", OURS, "file", bits, modes)
    yield from _modes("transformers", "transformers", "safetensors", "bf16", _TRANSFORMERS)
    yield from _modes("vllm", "vllm", "safetensors", "bf16", _VLLM)
    yield from _modes("llama.cpp-q8_0", "llama_cpp", "q8_0", "Q8_0, int8 activations")
    yield from _modes("llama.cpp-q4_0", "llama_cpp", "q4_0", "Q4_0, int8 activations")
    yield from _modes("llama.cpp-file", "llama_cpp", "file", _FILE_BITS)
    yield from _modes("openvino", "openvino", "file", "the file's own", _OPENVINO)


ENGINES: Final = tuple(_engines())


class Named(Protocol):
    """An engine of any table."""

    @property
    def name(self) -> str: ...
    @property
    def draft(self) -> Any: ...


_Named = TypeVar("_Named", bound=Named)


def select(engines: Sequence[_Named], patterns: str, *, has_draft: bool) -> list[_Named]:
    """Return the engines that match comma-separated patterns, in their order.

    Engines with a draft model are left out without one. Raises ValueError for a pattern without a match.
    """
    able = [engine for engine in engines if has_draft or not engine.draft]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(engine.name, pattern) for engine in able):
            names = ", ".join(engine.name for engine in able)
            raise ValueError(
                f"no engine is called {pattern!r}, or it needs --draft; allowed, with * for any text: {names}"
            )
    return [engine for engine in able if any(fnmatchcase(engine.name, pattern) for pattern in wanted)]


class WeightsError(Exception):
    """A model cannot be converted; the message is one line."""


@dataclass(frozen=True)
class Home:
    """The folder with the other engines' environments and with converted weights."""

    folder: Path

    def python(self, environment: str) -> Path:
        """Return the Python of an environment, which may not exist."""
        return self.folder / environment / "bin" / "python"

    def weights(self, model: Path, form: str) -> Path:
        """Return `model` in a form: "file" (unchanged), "safetensors", "q8_0" or "q4_0".

        Raises WeightsError if it cannot be converted.
        """
        if form == "file" or (form == "safetensors" and model.is_dir()):
            return model
        environment, script, command, arguments, suffix = _CONVERTERS[form]
        # Files of one name differ in size; a truncated file cannot be converted.
        target = self.folder / "weights" / f"{model.stem}-{model.stat().st_size}-{form}{suffix}"
        if target.exists():
            return target
        if model.is_dir():
            raise WeightsError(f"{model.name} is a folder; {form} is made from a .gguf file only: give one")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"partial-{target.name}")
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
        words = [str(self.python(environment)), str(_HERE / script), command, str(model), str(partial)]
        try:
            done = subprocess.run([*words, *arguments], capture_output=True, text=True, check=False)
        except OSError:
            raise WeightsError(f"{form} weights need the {environment} environment; {INSTALL}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise WeightsError(f"{script} failed: {last}")
        partial.rename(target)
        return target


def default_home() -> Path:
    """Return the folder of install.sh."""
    named = os.environ.get("SPECINFER_PEERS")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "specinfer-peers"
