"""LibraryErrors and Panics: the tokenizers library's complaints, as ours."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from specinfer.errors import ModelFileError, RequestError


class LibraryErrors:
    """A `with` block in which the library reads a file: its errors leave as ModelFileError.

    The library raises bare `Exception` for all it finds wrong, so exactly that class is translated, and
    its panics are; everything else passes through.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or _is_panic(kind):
            raise ModelFileError(f"the tokenizer in {self._path} is damaged: {error}") from error


class Panics:
    """A `with` block in which the library reads a text: its panics leave as RequestError.

    It panics where a regex of the tokenizer's does not end. A panic is no Exception, and ends threads.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _is_panic(kind):
            raise RequestError(
                f"the model's tokenizer cannot read the text ({error}); shorten it, or change its repetitions"
            ) from None


def _is_panic(kind: type[BaseException] | None) -> bool:
    return kind is not None and kind.__name__ == "PanicException"  # which cannot be imported
