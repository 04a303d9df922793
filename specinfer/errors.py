"""Every exception specinfer raises on purpose: most are UserErrors, an IntegrityError is a bug of ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class SpecInferError(Exception):
    """The root of specinfer's exceptions."""


class UserError(SpecInferError, ValueError):
    """Something the caller can mend; the message says what was got, what is allowed, what to do."""


class ConfigError(UserError):
    """An engine option is unknown or out of range."""


class KeyRefusedError(ConfigError):
    """One of two processes on two hosts does not know the other's key."""


class RequestError(UserError):
    """A prompt or a sampling parameter cannot be served.

    `parameter` is the field of SamplingParams at fault, or prompt, messages or params (several SamplingParams
    that do not fit the prompts); what OpenAI's API calls `param`. None where no parameter is.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


@contextmanager
def naming(parameter: str) -> Iterator[None]:
    """Name the parameter in whatever RequestError is raised meanwhile that names none."""
    try:
        yield
    except RequestError as error:
        error.parameter = error.parameter or parameter
        raise


class ModelError(UserError):
    """A model cannot be used."""


class UnhostedError(ModelError):
    """A model that transformers' code cannot run here, and why; the message ends a sentence on the model."""


class ModelNotFoundError(ModelError):
    """No model of that name is known, on disk or on the hub."""


class GatedModelError(ModelError):
    """A hub model has terms that the user has not accepted yet."""


class ModelFileError(ModelError):
    """A model file is missing, truncated, or not of the expected kind."""


class AdapterError(ModelError):
    """An adapter that requests have named cannot be read any more."""

    def __init__(self, message: str, adapter: str) -> None:
        super().__init__(message)
        self.adapter = adapter  # its name


class DamagedFileError(ModelFileError):
    """A prepared file does not hold what was written; it must be made anew."""


class ChecksumError(ModelError):
    """A downloaded file does not have the checksum the catalogue gives."""


class DownloadError(UserError):
    """A download failed: the source cannot be reached, or the disk is full."""


class SourceUnavailableError(DownloadError):
    """A source cannot be reached, or lacks the file; the next one may do."""


class DatasetError(UserError):
    """A line of a prompt file cannot be read."""


class DrawRuleError(UserError):
    """A draw cannot be verified losslessly by the chosen verifier."""


class KernelBuildError(UserError):
    """No C++ compiler is there, or it failed; the message holds its last lines."""


class SpeculatorError(UserError):
    """A speculator proposed what is no tree for its entry."""


class LogitsError(UserError):
    """The model's logits are no numbers at some token of a request; others go on."""


class TraceTooSmallError(UserError):
    """A policy asks for guesses that a trace does not have."""


class TuneError(UserError):
    """A tuning that cannot be begun, gone on with or ended."""


class ClosedError(UserError):
    """An LLM, or the loop that drives its engine, was closed and takes no more requests."""


class PeerLostError(UserError):
    """A rank of this process's group ended, was stopped or fell out of step; the group must start anew."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CapacityError(UserError):
    """Weights or KV cache do not fit in the memory there is."""


class IntegrityError(SpecInferError):
    """An internal invariant is broken; please report it."""


def ensure(holds: bool, invariant: str) -> None:
    """Raise IntegrityError unless an invariant holds; unlike `assert`, under `python -O` as well."""
    if not holds:
        raise IntegrityError(invariant)


def shown(value: object, most: int = 60) -> str:
    """A value as it reads in one line of a message, of at most so many characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that nests too deep"
    return text if len(text) <= most else text[: most - 3] + "..."
