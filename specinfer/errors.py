"""Exceptions of specinfer. A UserError is for the caller to fix; an IntegrityError is a bug of specinfer."""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Messages of PyTorch and of the dynamic linker.
_NO_MEMORY: Final = re.compile("can(?:'t|not) allocate memory|failed to map segment", re.IGNORECASE)


class SpecInferError(Exception):
    """Base class of specinfer's exceptions."""


class UserError(SpecInferError, ValueError):
    """An error that the caller can fix; the message gives the value, the allowed values and what to do."""


class ConfigError(UserError):
    """An engine option is unknown or out of range."""


class KeyRefusedError(ConfigError):
    """Two processes on two hosts do not have the same key."""


class RequestError(UserError):
    """A prompt or a sampling parameter cannot be served.

    `parameter` names the invalid field of SamplingParams, or is "prompt", "messages" or "params" (the number
    of SamplingParams differs from the number of prompts). OpenAI's API calls it `param`. None if no single
    parameter is invalid.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


@contextmanager
def naming(parameter: str) -> Iterator[None]:
    """Set `parameter` on each RequestError that the block raises without one."""
    try:
        yield
    except RequestError as error:
        error.parameter = error.parameter or parameter
        raise


class ModelError(UserError):
    """A model cannot be used."""


class ConfigKeyError(ModelError):
    """A native family does not compute what `key` of config.json sets."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class UnhostedError(ModelError):
    """transformers' code cannot run a model here; the message completes a sentence that names the model."""


class ModelNotFoundError(ModelError):
    """No model of that name exists on disk, in the catalogue or on the hub."""


class GatedModelError(ModelError):
    """A hub model has terms of use that the user has not accepted."""


class ModelFileError(ModelError):
    """A model file is missing, truncated, or not of the expected kind."""


class AdapterError(ModelError):
    """An adapter that a request names can no longer be read; `adapter` is its name."""

    def __init__(self, message: str, adapter: str) -> None:
        super().__init__(message)
        self.adapter = adapter


class DamagedFileError(ModelFileError):
    """A prepared file is damaged and must be written again."""


class ChecksumError(ModelError):
    """A downloaded file does not have the catalogue's checksum."""


class DownloadError(UserError):
    """A download failed: the source cannot be reached, or the disk is full."""


class SourceUnavailableError(DownloadError):
    """A source cannot be reached or lacks the file; the caller tries the next source."""


class DatasetError(UserError):
    """A line of a prompt file cannot be read."""


class DrawRuleError(UserError):
    """The chosen verifier is not lossless for a speculator's draw rule."""


class KernelBuildError(UserError):
    """The C++ compiler is missing or failed; the message has its last lines."""


class SpeculatorError(UserError):
    """A speculator returned an invalid tree."""


class LogitsError(UserError):
    """The model's logits are not finite at a token of one request; other requests continue."""


class TuneError(UserError):
    """A tuning run cannot start, continue or end."""


class ClosedError(UserError):
    """An LLM or its engine loop is closed and accepts no requests."""


class PeerLostError(UserError):
    """A rank of the process group ended, stopped or lost synchronization; the group must be restarted."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CapacityError(UserError):
    """The weights, the adapters or the KV cache do not fit into the available memory."""


class IntegrityError(SpecInferError):
    """An internal invariant does not hold: a bug of specinfer, please report it."""


def ensure(holds: bool, invariant: str) -> None:
    """Raise IntegrityError unless an invariant holds; unlike `assert`, it also runs under `python -O`."""
    if not holds:
        raise IntegrityError(invariant)


def shown(value: object, max_length: int = 60) -> str:
    """Return the repr of a value for an error message, cut to `max_length` characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that nests too deep"
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def unread(kind: object) -> str:
    """Return the words that a part of a message of this type is unsupported; "" for types of text."""
    name = kind if isinstance(kind, str) else ""
    sense = next((sense for sense in ("image", "audio", "video") if sense in name), None)
    return f"{sense} input is not supported" if sense else ""


def lack_of_memory(error: BaseException) -> str | None:
    """Return one line about the limit of memory that an allocation met; None for other errors."""
    import resource

    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    of_libraries = isinstance(error, RuntimeError | ImportError) and _NO_MEMORY.search(str(error))
    if not refused and not of_libraries:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    what, advice = "the system has no memory left", "free some memory, raise the limit of its container"
    if limit != resource.RLIM_INFINITY:
        what = f"the process may take {limit / (1 << 30):.2f} GiB of addresses (ulimit -v)"
        advice = "raise that limit: ulimit -v unlimited"
    return f"{what}, and it needs more; {advice}, or choose a smaller model"


@contextmanager
def allocating() -> Iterator[None]:
    """Raise CapacityError if the block fails for lack of memory."""
    try:
        yield
    except Exception as error:
        if (line := lack_of_memory(error)) is None:
            raise
        raise CapacityError(line) from error
