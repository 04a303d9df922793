"""The engines of peers.py and their modes, and a model's weights in each engine's format."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeVar

from specinfer.errors import UserError

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
    own = engine in ("llama_cpp", "ik_llama")
    return [str(_HERE / ("run_llama_cpp.py" if own else "run_engines.py")), engine]


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
    Engine(
        name=name + suffix,
        script=script,
        form=form,
        bits=bits,
        plain=name,
        draft="draft" in suffix,
        options=options,
    )
    for name, script, form, bits, modes in _TABLE
    for suffix, options in modes.items()
)


_Named = TypeVar("_Named", bound=Any)  # an engine of any table, with a name and perhaps a draft


def select(engines: Sequence[_Named], patterns: str, *, has_draft: bool) -> list[_Named]:
    """Return the engines that match comma-separated patterns, in their order.

    Engines with a draft model are left out without one. Raises UserError for a pattern without a match.
    """
    able = [engine for engine in engines if has_draft or not engine.draft]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(engine.name, pattern) for engine in able):
            names = ", ".join(engine.name for engine in able)
            raise UserError(
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
