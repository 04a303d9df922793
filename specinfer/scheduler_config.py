"""SchedulerConfig and CacheConfig: the frozen options of steps, and of the KV cache that they use."""

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal

from specinfer.errors import ConfigError
from specinfer.option import check_options, option
from specinfer.speculation_config import MAX_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Options of the paged KV cache; raises ConfigError for a wrong value."""

    block_size: int = option(16, "Positions in a block of the KV cache.", minimum=1, rare=True)
    memory: int | None = option(
        None,
        "Memory for all KV caches and recurrent states, like 2GB.",
        shown="4 requests of max_context tokens and prompt_memory, at most half of the free memory",
        name="kv_cache_memory",
        minimum=1,
        size=True,
    )
    prompt_memory: int = option(
        8 << 30,
        "Memory for KV blocks of earlier texts that later prompts may begin with, like 8GB.",
        more="Beside the blocks of running requests, within `kv_cache_memory` and half of the free memory. "
        "Texts take it as they come; the oldest are evicted.",
        shown="8GB",
        minimum=0,
        size=True,
    )
    prompt_store: str | None = option(
        None,
        "Folder in which KV blocks of earlier texts outlive the process.",
        more="Engines with the same model, options that affect its numbers, kind of CPU and version share a "
        "folder. Damaged files are computed again ([production.md](production.md)).",
        shown="none",
        allowed="the path of a folder, or None",
    )
    prompt_store_size: int = option(
        32 << 30,
        "Maximum size of prompt_store; the least recently used files are removed.",
        shown="32GB",
        minimum=1,
        size=True,
    )
    prefix_reuse: bool = option(
        True,
        "Share KV blocks among requests with the same prefix.",
        more="Only requests with the same `cache_salt` share them. A model with recurrent layers reuses a "
        "prefix up to a checkpoint of its states, which take up to a quarter of `kv_cache_memory`.",
        rare=True,
    )

    def __post_init__(self) -> None:
        if isinstance(self.prompt_store, PathLike):
            object.__setattr__(self, "prompt_store", fspath(self.prompt_store))
        check_options(self)
        if self.prompt_store is not None and not self.prefix_reuse:
            raise ConfigError("prompt_store is set with prefix_reuse False; leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Options of the request scheduler; raises ConfigError for a wrong value."""

    max_batch_size: int = option(
        16,
        "Maximum requests in one step.",
        more="With recurrent layers fewer, if their states would take half of `kv_cache_memory`.",
        minimum=1,
    )
    max_step_tokens: int | Literal["auto"] | None = option(
        None,
        "Maximum rows of one pass, for prompts and trees together, or auto.",
        more="`auto`: as many rows as a pass has before it takes twice as long as with one, 128 to 2048. "
        "This prefills a prompt in few passes and bounds the delay of other requests.",
        shown="512, of a server 128; auto where layers are streamed",
        minimum=1,
    )
    max_context: int | None = option(
        None, "Maximum tokens of a request, prompt and output together.", shown="the model's own", minimum=2
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.row_limit < self.max_batch_size:
            raise ConfigError(
                f"max_step_tokens is {self.row_limit}; allowed: {self.max_batch_size} "
                "(max_batch_size) or more, as every request needs a row; raise it"
            )

    @property
    def row_limit(self) -> int:
        """Maximum rows of a pass; for "auto" the largest that it may choose."""
        rows = 512 if self.max_step_tokens is None else self.max_step_tokens
        return max(MAX_ROWS, self.max_batch_size) if rows == "auto" else rows
