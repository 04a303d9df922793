"""The engines of peers.py and their modes, their processes, and a model's weights in each one's format."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.peers.process import Worker, WorkerError
from specinfer.errors import UserError

OURS: Final = "specinfer"
_CONVERTERS: Final = {  # form -> script, its command, more arguments, suffix of the result
    "safetensors": ("transformers", "to_safetensors", (), ""),
    "q8_0": ("llama_cpp", "quantize", ("Q8_0",), ".gguf"),
    "q4_0": ("llama_cpp", "quantize", ("Q4_0",), ".gguf"),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine in one mode."""

    name: str
    script: str  # run_engines.py or run_llama_cpp.py has it; but for OURS, also its environment
    form: str  # Home.weights has the forms
    bits: str  # precision, for the table
    plain: str  # name of the same engine without speculation
    draft: bool  # gets the draft model
    options: Mapping[str, Any]


_Modes = Mapping[str, Mapping[str, Any]]  # suffix of the name -> options; "+draft" gets the draft model
_LOOKUPS: Final = {"": {"lookup": False}, "+ngram": {"lookup": True}}
# The draft is always int4: its trees are as good as in bfloat16, and it does not change the text.
_SPECULATION: Final[_Modes] = _LOOKUPS | {
    "+draft" + suffix: {"draft_quantization": "int4", **options} for suffix, options in _LOOKUPS.items()
}


def _loaded(quantization: str) -> _Modes:
    loading = {"dtype": "bfloat16", "quantization": quantization}
    return {suffix: {**loading, **options} for suffix, options in _SPECULATION.items()}


def _vllm(method: str, **options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 4, **options}}


def _flags(*kinds: str, **numbers: int) -> dict[str, Any]:
    """Return llama-server's options of kinds of speculation; without numbers they are its own."""
    pairs = ((f"--spec-{name.replace('_', '-')}", str(number)) for name, number in numbers.items())
    return {"flags": ["--spec-type", ",".join(kinds), *(word for pair in pairs for word in pair)]}


_FILE_BITS: Final = "the file's own, int8 activations"
_SHORT: Final = {"ngram_simple_size_n": 4, "ngram_simple_size_m": 8}
# Name, environment, form of the weights, precision, modes.
_TABLE: Final[Sequence[tuple[str, str, str, str, _Modes]]] = (
    # "-default" is a command without an option, which takes a known draft beside the model.
    (f"{OURS}-file", OURS, "file", _FILE_BITS,
     {"": {"lookup": False}, "-default": {"drafts": ["auto"]}, "+ngram": {}, "+draft": {}}),
    (f"{OURS}-bf16", OURS, "file", "bf16", _loaded("none")),
    (f"{OURS}-int8", OURS, "file", "int8", _loaded("int8")),
    (f"{OURS}-int4", OURS, "file", "int4, int8 activations, with AMX bf16", _loaded("int4")),
    # Up to 3 tokens by default; n-grams of 12 by default, followed by up to 48 tokens.
    ("llama-server", "llama_server", "file", _FILE_BITS,
     {"": {"flags": []},
      "+draft": _flags("draft-simple"),
      "+draft-6": _flags("draft-simple", draft_n_max=6),
      "+draft-12": _flags("draft-simple", draft_n_max=12),
      "+ngram-simple": _flags("ngram-simple"),
      "+ngram-short": _flags("ngram-simple", **_SHORT),
      "+ngram-map": _flags("ngram-map-k"),
      "+ngram-mod": _flags("ngram-mod"),
      "+ngram-cache": _flags("ngram-cache"),
      "+draft+ngram": _flags("draft-simple", "ngram-simple", **_SHORT)}),
    ("llama.cpp-file", "llama_cpp", "file", _FILE_BITS, {"": {}}),
    ("llama.cpp-q8_0", "llama_cpp", "q8_0", "Q8_0, int8 activations", {"": {}}),
    ("llama.cpp-q4_0", "llama_cpp", "q4_0", "Q4_0, int8 activations", {"": {}}),
    ("ik_llama", "ik_llama", "file", _FILE_BITS, {"": {}, "+draft": {"draft_tokens": 3}}),
    # For draft models and EAGLE heads it reads OpenVINO's own format only, no GGUF file.
    ("openvino", "openvino", "file", "the file's own",
     {"": {}, "+lookup": {"prompt_lookup": True,
                          "generation": {"num_assistant_tokens": 4, "max_ngram_size": 4}}}),
    # Its own defaults for the assistant: up to 20 tokens, fewer when it is not confident.
    ("transformers", "transformers", "safetensors", "bf16",
     {"": {}, "+draft": {}, "+lookup": {"prompt_lookup_num_tokens": 10}}),
    ("vllm", "vllm", "safetensors", "bf16",
     {"": {}, "+draft": _vllm("draft_model"),
      "+ngram": _vllm("ngram", prompt_lookup_max=4, prompt_lookup_min=1)}),
)  # fmt: skip
ENGINES: Final = tuple(
    Engine(name + suffix, script, form, bits, name, "draft" in suffix, options)
    for name, script, form, bits, modes in _TABLE
    for suffix, options in modes.items()
)


def select(patterns: str, *, has_draft: bool) -> list[Engine]:
    """Return the engines that match comma-separated patterns, in their order.

    Engines with a draft model are left out without one. Raises UserError for a pattern without a match.
    """
    able = [engine for engine in ENGINES if has_draft or not engine.draft]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(engine.name, pattern) for engine in able):
            names = ", ".join(engine.name for engine in able)
            raise UserError(
                f"no engine is called {pattern!r}, or it needs --draft; allowed, with * for any text: {names}"
            )
    return [engine for engine in able if any(fnmatchcase(engine.name, pattern) for pattern in wanted)]


def default_home() -> Path:
    """Return the folder of install.sh."""
    named = os.environ.get("SPECINFER_PEERS")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "specinfer-peers"


@dataclass(frozen=True)
class Home:
    """The folder with the other engines' environments and with converted weights."""

    folder: Path = field(default_factory=default_home)

    def start(
        self, script: str, threads: int, timeout: float, inside: Callable[[list[str]], list[str]] = list
    ) -> Worker:
        """Start an engine's child; `inside` wraps its command. Raises WorkerError."""
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        return Worker(inside(self._command(script, script)), environment, timeout)

    def call(self, script: str, *words: str, given: str | None = None) -> str:
        """Return what a command of an engine's script prints, `given` its input; raises WorkerError."""
        command = self._command(script, *words)
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise WorkerError(f"{words[0]} of {script} failed: {last}")
        return done.stdout

    def weights(self, model: Path, form: str) -> Path:
        """Return `model` in a form: "file" (unchanged), "safetensors", "q8_0" or "q4_0".

        Raises WorkerError if it cannot be converted.
        """
        if form == "file" or (form == "safetensors" and model.is_dir()):
            return model
        script, command, arguments, suffix = _CONVERTERS[form]
        # Files of one name differ in size; a truncated file cannot be converted.
        target = self.folder / "weights" / f"{model.stem}-{model.stat().st_size}-{form}{suffix}"
        if not target.exists():
            if model.is_dir():
                raise WorkerError(f"{model.name} is a folder; give a .gguf file, from which {form} is made")
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent) as folder:
                whole = Path(folder) / target.name
                self.call(script, command, str(model), str(whole), *arguments)
                whole.rename(target)
        return target

    def _command(self, script: str, *words: str) -> list[str]:
        python = Path(sys.executable) if script == OURS else self.folder / script / "bin" / "python"
        if not python.exists():
            raise WorkerError(f"{script} is not installed; run: make peers-env")
        file = "run_llama_cpp.py" if script in ("llama_cpp", "ik_llama") else "run_engines.py"
        return [str(python), str(Path(__file__).with_name(file)), *words]
