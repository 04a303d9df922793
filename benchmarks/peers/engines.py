"""The engines of peers/peers.py and their modes: one row of the table each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

OURS = "specinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine in one mode."""

    name: str
    script: str  # run_<script>.py
    environment: str | None  # folder of its virtual environment; None: the Python that runs the benchmark
    form: str  # weights.Home.weights has the forms
    bits: str  # precision, for the table
    plain: str  # name of the same engine without speculation
    draft: bool = False  # gets the draft model
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """True for specinfer."""
        return self.script == OURS


# specinfer: every quantization with every kind of speculation. The draft is always int4: its trees are as
# good as in bfloat16 (docs/log.md), and it does not change the text.
_QUANTIZATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {"dtype": "bfloat16", "quantization": "none"}),
    "int8": ("int8", {"dtype": "bfloat16", "quantization": "int8"}),
    "int4": ("int4, int8 activations, with AMX bf16", {"dtype": "bfloat16", "quantization": "int4"}),
}
_SPECULATION: dict[str, dict[str, Any]] = {
    "": {"lookup": False},
    "+ngram": {"lookup": True},
    "+draft": {"draft_quantization": "int4", "lookup": False},
    "+draft+ngram": {"draft_quantization": "int4", "lookup": True},
}


def _ours() -> Iterable[Engine]:
    # No option at all, as beside it llama.cpp-file; and the same without speculation.
    plain, bits = f"{OURS}-file", "the file's own, int8 activations; the default"
    for name, options in ((plain, {"lookup": False}), (f"{OURS}-default", {})):
        yield Engine(
            name=name, script=OURS, environment=None, form="file", bits=bits, plain=plain, options=options
        )
    for quantization, (bits, loading) in _QUANTIZATIONS.items():
        for suffix, speculation in _SPECULATION.items():
            yield Engine(
                name=f"{OURS}-{quantization}{suffix}",
                script=OURS,
                environment=None,
                form="file",
                bits=bits,
                plain=f"{OURS}-{quantization}",
                draft="draft" in suffix,
                options={**loading, **speculation},
            )


def _theirs(
    name: str,
    *,
    script: str,
    form: str,
    bits: str,
    modes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterable[Engine]:
    """Return an engine in its modes: suffix of the name -> options; "+draft" gets the draft model."""
    for suffix, options in (modes or {"": {}}).items():
        yield Engine(
            name=name + suffix,
            script=script,
            environment=script,
            form=form,
            bits=bits,
            plain=name,
            draft="draft" in suffix,
            options=options,
        )


ENGINES: tuple[Engine, ...] = (
    *_ours(),
    *_theirs(
        "transformers",
        script="transformers",
        form="safetensors",
        bits="bf16",
        # Its own defaults for the assistant: up to 20 tokens, fewer when it is not confident.
        modes={"": {}, "+draft": {}, "+lookup": {"prompt_lookup_num_tokens": 10}},
    ),
    *_theirs(
        "vllm",
        script="vllm",
        form="safetensors",
        bits="bf16",
        modes={
            "": {},
            "+draft": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
            "+ngram": {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_max": 4,
                    "prompt_lookup_min": 1,
                }
            },
        },
    ),
    *_theirs("llama.cpp-q8_0", script="llama_cpp", form="q8_0", bits="Q8_0, int8 activations"),
    *_theirs("llama.cpp-q4_0", script="llama_cpp", form="q4_0", bits="Q4_0, int8 activations"),
    *_theirs(
        "llama.cpp-file",
        script="llama_cpp",
        form="file",
        bits="the file's own, int8 activations; the default",
    ),
    *_theirs(
        "openvino",
        script="openvino",
        form="file",
        bits="the file's own",
        modes={
            "": {},
            # No "+draft": for draft models it reads OpenVINO's own format only, no GGUF file.
            "+lookup": {
                "prompt_lookup": True,
                "generation": {"num_assistant_tokens": 4, "max_ngram_size": 4},
            },
        },
    ),
)


def select(patterns: str, *, has_draft: bool) -> list[Engine]:
    """Return the engines that match comma-separated patterns, in the table's order.

    Engines with "+draft" are left out without a draft model. Raises ValueError for a pattern without a match,
    or without one that runs without a draft model.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        found = [engine for engine in ENGINES if fnmatchcase(engine.name, pattern)]
        if not found:
            names = ", ".join(engine.name for engine in ENGINES)
            raise ValueError(f"no engine is called {pattern!r}; allowed, with * for any text: {names}")
        if not has_draft and all(engine.draft for engine in found):
            raise ValueError(f"{pattern} needs a draft model; give --draft")
    return [
        engine
        for engine in ENGINES
        if any(fnmatchcase(engine.name, pattern) for pattern in wanted) and (has_draft or not engine.draft)
    ]
