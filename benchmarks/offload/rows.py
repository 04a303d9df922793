"""The rows under every limit: specinfer with each kind of speculation, and the peers, each in its best
mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

PLAIN: Final = "plain"
KINDS: Final = ("none", "int8", "int4")  # quantizations of the target
DRAFT_TOKENS: Final = 16  # length of a peer's chain; a pass takes seconds, so it may be long


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one mode."""

    name: str
    peer: str | None = None  # run_<peer>.py in the environment of that name; None: specinfer
    form: str = "folder"  # the dithered folder, or "bf16" or "q8_0" as a GGUF file
    draft: str | None = None  # the small model as the available GGUF "file", or as "safetensors"
    options: Mapping[str, Any] = field(default_factory=dict)
    edits: bool | None = None  # True: only for edits; False: never for edits; None: every workload
    predicts: bool = False  # gets the old file as the prediction
    kinds: tuple[str, ...] = KINDS  # quantizations that it runs for


# Plain has one-node trees: no draft, no `offload="auto"` copy of the target, no lookups.
OURS: Final = (
    Row(name=PLAIN, options={"lookup": False, "max_nodes": 1}),
    Row(
        name="self",
        options={"drafts": ["self"], "draft_quantization": "int4", "lookup": False},
        kinds=("none", "int8"),
    ),
    Row(name="small", draft="file", options={"draft_quantization": "int4", "lookup": False}),
    Row(name="auto"),
    Row(name="prediction", options={"lookup": False, "offload": "layers"}, edits=True, predicts=True),
)
_BEST_ASSISTANT: Final = {
    "num_assistant_tokens": DRAFT_TOKENS,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
PEERS: Final = (
    Row(name="llama.cpp bf16", peer="llama_cpp", form="bf16", edits=False, kinds=("none",)),
    Row(
        name="llama.cpp bf16 + small",
        peer="llama_cpp",
        form="bf16",
        draft="file",
        options={"draft_tokens": DRAFT_TOKENS},
        edits=False,
        kinds=("none",),
    ),
    Row(name="llama.cpp q8_0", peer="llama_cpp", form="q8_0", edits=False, kinds=("none", "int8")),
    Row(
        name="llama.cpp q8_0 + small",
        peer="llama_cpp",
        form="q8_0",
        draft="file",
        options={"draft_tokens": DRAFT_TOKENS},
        edits=False,
        kinds=("none", "int8"),
    ),
    Row(name="accelerate", peer="transformers", edits=False, kinds=("none",)),
    Row(
        name="accelerate + small",
        peer="transformers",
        draft="safetensors",
        options={"assistance": _BEST_ASSISTANT},
        edits=False,
        kinds=("none",),
    ),
    Row(name="airllm", peer="airllm", edits=False, kinds=("none",)),
)
ROWS: Final = (*OURS, *PEERS)


def select(patterns: str) -> list[Row]:
    """Return the rows that match comma-separated patterns; raises ValueError if none does."""
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(row.name, pattern) for row in ROWS):
            names = ", ".join(row.name for row in ROWS)
            raise ValueError(f"no row is called {pattern!r}; allowed, with * for any text: {names}")
    return [row for row in ROWS if any(fnmatchcase(row.name, pattern) for pattern in wanted)]
