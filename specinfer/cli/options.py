"""The options that several commands share, and what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specinfer.config import OLD_NAMES, EngineConfig
from specinfer.errors import ConfigError
from specinfer.hub.catalogue import heads_of

if TYPE_CHECKING:
    from specinfer.llm import LLM

DEFAULT_MODEL = "smollm2-135m"
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_Command = TypeVar("_Command", bound=Callable[..., Any])


def parse_size(text: str) -> int:
    """Bytes from '512MB', '2GiB', '1.5G' (powers of 1024) or a plain number; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"size is {text!r}; allowed: a number of bytes, or like 512MB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def model_options(command: _Command) -> _Command:
    """--model, --dtype, --quantization, --device, --threads, --chat-template, and those of memory."""
    for option in reversed(
        [
            click.option(
                "--model",
                "-m",
                default=DEFAULT_MODEL,
                show_default=True,
                help="The target: a folder, a GGUF file, a hub id (org/name) or a catalogue name.",
            ),
            click.option("--dtype", default="auto", help="auto, bfloat16 or float32."),
            click.option("--quantization", help="none, int8 or int4: how matrices are kept, on a CPU."),
            click.option("--device", default="auto", help="auto, cpu or cuda."),
            click.option(
                "--threads", type=int, metavar="N", help="That compute on a CPU; default: its cores."
            ),
            click.option(
                "--chat-template", metavar="FILE", help="A chat template in place of the model's own."
            ),
            click.option("--kv-cache-memory", metavar="SIZE", help="For all KV caches, like 2GB."),
            click.option("--max-context", type=int, metavar="N", help="Prompt and output tokens at most."),
        ]
    ):
        command = option(command)
    return command


def speculation_options(command: _Command) -> _Command:
    """--draft, --draft-quantization, --draft-vocabulary, --lookup, --expansion, and others."""
    for option in reversed(
        [
            click.option(
                "--draft", "drafts", multiple=True, metavar="MODEL", help="A draft model; repeatable."
            ),
            click.option("--draft-quantization", help="As --quantization, of draft models."),
            click.option(
                "--draft-vocabulary",
                metavar="N|FILE",
                help="Cut a draft's output layer to N common tokens, or to the token ids in FILE.",
            ),
            click.option(
                "--draft-tokens",
                show_default="auto",
                help="What drafts of another vocabulary guess: shared tokens, text, or auto.",
            ),
            click.option(
                *(f"--{name}/--no-{name}" for name in ("lookup", *OLD_NAMES)),
                "lookup",
                default=None,
                help="Look guesses up in the text and in earlier answers.",
            ),
            click.option(
                "--expansion",
                show_default="learned; 1,1,3,1,1 where trees are of a fixed size",
                metavar="K1,K2,...|learned",
                help="Children of each frontier node of a draft's tree, level by level; learned: where "
                "guesses are likely.",
            ),
            click.option("--max-nodes", type=int, metavar="N", help="Of one request's tree, root included."),
            click.option(
                "--tree-size",
                show_default="cost",
                help="cost: of these trees the part that is fastest here; fixed: all of them.",
            ),
            click.option(
                "--clock",
                show_default="measured",
                help="measured: costs follow what steps take; curve: as measured at first.",
            ),
            click.option("--verifier", default="coupled", show_default=True, help="coupled or mss."),
            click.option(
                "--draw",
                help="How drafts draw: coupled or top_k; with mss without_replacement, iid or top_k.",
            ),
        ]
    ):
        command = option(command)
    return command


def build_llm(options: dict[str, Any], **more: Any) -> LLM:
    """An LLM from the model and speculation options, loaded with a progress bar; raises UserError."""
    config = engine_config({**options, **more})  # before torch is loaded: a slip is answered at once
    from specinfer.llm import LLM
    from specinfer.progress import ProgressBar

    return LLM(config, progress=ProgressBar())


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The engine's config from the model and speculation options; None stands for one that is not given.

    Where no speculator is named, the draft head that comes with the model, if there is one, joins those that
    are on by default. Raises ConfigError.
    """
    given = {name: value for name, value in options.items() if value is not None}
    model = given.pop("model")
    if isinstance(memory := given.get("kv_cache_memory"), str):
        given["kv_cache_memory"] = parse_size(memory)
    named = given.get("drafts") or any(name in given for name in ("lookup", *OLD_NAMES))
    if not named:
        given["drafts"] = heads_of(model)
    config = EngineConfig.from_options(model, given)
    for name in ("draft_quantization", "draft_vocabulary", "draft_tokens", "expansion", "draw"):
        if name in given and not given.get("drafts"):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for draft models, and none is named; add --draft MODEL"
            )
    return config
