"""AdapterCache: the adapters of one model by name; a few are in memory, others are read when used."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from heapq import nlargest
from pathlib import Path
from typing import Final

import torch

from specinfer.errors import AdapterError, CapacityError, ModelError, RequestError
from specinfer.kernels.library import Library
from specinfer.kernels.low_rank import AdaptedRows, Adapter, Span
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.config import ModelConfig
from specinfer.request import LoRARequest
from specinfer.speculation_config import Quantization

_MIB: Final = 1 << 20


def adapter_dtype(quantization: Quantization, dtype: torch.dtype) -> torch.dtype:
    """The dtype of adapters in memory: int8 if the weights are quantized, else the model's."""
    return dtype if quantization == "none" else torch.int8


class AdapterCache:
    """Registers and checks adapters, and loads those that passes use. Thread-safe.

    A name refers to the same weights for the lifetime of the cache, since cached prefixes computed with an
    adapter are found by its name.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        weights: torch.dtype,
        device: torch.device,
        library: Library | None,
        limit: int,
        free: Callable[[], int],
        unsupported_reason: str | None = None,
    ) -> None:
        """At most `limit` adapters are in memory, in dtype `weights`.

        With an `unsupported_reason` none is accepted, and errors have the reason.
        `free` returns the bytes of memory that are free; on a CPU the unwritten part of a KV cache is free.
        """
        self._config = config
        self._weights, self._device, self._library = weights, device, library
        self._limit = limit
        self._free = free
        self._unsupported_reason = unsupported_reason
        self.default: str | None = None  # adapter of requests that name none
        self._reading = threading.RLock()  # held while files are read; a step takes `_guard` only
        self._guard = threading.Lock()  # guards the adapters in memory
        self._folders: dict[str, PeftFolder] = {}
        self._numbers: dict[int, str] = {}  # adapter names by lora_int_id
        self._resident: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._fetching: threading.Thread | None = None  # which reads one for requests that wait
        self._failed: dict[str, AdapterError] = {}  # reasons why that failed

    @property
    def names(self) -> Collection[str]:
        """Names that requests may use."""
        return self._folders.keys()

    @property
    def digests(self) -> Mapping[str, str]:
        """Hashes of their files, by name."""
        return {name: folder.digest() for name, folder in self._folders.items()}

    def max_bytes(self, *more: PeftFolder) -> int:
        """The maximum bytes of the registered adapters, and of these, in memory."""
        folders = (*self._folders.values(), *more)
        return sum(nlargest(self._limit, (folder.bytes(self._weights) for folder in folders)))

    def missing_bytes(self, *more: PeftFolder) -> int:
        """Memory that the registered adapters, and these, may take in addition to those in memory."""
        there = sum(self._folders[name].bytes(self._weights) for name in [*self._resident])
        return max(0, self.max_bytes(*more) - there)

    def register(self, name: str, path: Path) -> None:
        """Check an adapter and register it; `load` reads it.

        Raises ModelError if it is not supported, and a subclass if it is damaged or for another model.
        """
        with self._reading:
            self._folders[name] = self._checked(name, path.expanduser().resolve())

    def load(self) -> None:
        """Read registered adapters while there is room; raises ModelError as `PeftFolder.load`."""
        with self._reading:
            for name, folder in [*self._folders.items()][: self._limit]:
                self._resident[name] = self._loaded(folder)

    def add(self, name: str, path: Path) -> None:
        """Register an adapter that a request names: check it, and read it if there is room for one more.

        Raises as `register`, and ModelError if the name is used for another folder. Raises CapacityError if
        it does not fit into the free memory.
        """
        path = path.expanduser().resolve()
        with nullcontext() if name in self._folders else self._reading:  # a known one waits for no other
            known = self._folders.get(name)
            if known is not None and known.path != path:
                raise ModelError(f"adapter {name!r} is {known.path}; give {path} another name")
            if known is not None:
                return
            folder = self._checked(name, path)
            lacking, free = self.missing_bytes(folder), self._free()
            if lacking > free:
                raise CapacityError(
                    f"adapter {name!r} ({path}): adapters may then take {lacking / _MIB:.2f} MiB more, and "
                    f"{free / _MIB:.2f} MiB of memory are free; lower max_loras, or free some memory"
                )
            if len(self._resident) + (self._fetching is not None) < self._limit:
                loaded = self._loaded(folder)
                with self._guard:
                    self._resident[name] = loaded
            self._folders[name] = folder

    def _checked(self, name: str, path: Path) -> PeftFolder:
        if self._unsupported_reason is not None:
            raise ModelError(f"adapter {name!r} cannot be used: {self._unsupported_reason}")
        return PeftFolder(name, path, self._config)

    def named(self, request: LoRARequest) -> str:
        """The name of a request's adapter, which is registered if the request has a path.

        Raises RequestError for an unknown adapter, or a number used for another one, else as `add`.
        """
        self._check_number(request)
        if request.lora_path:
            self.add(request.lora_name, Path(request.lora_path))
        elif request.lora_name not in self._folders:
            raise RequestError(
                f"the adapter {request.lora_name!r} has no lora_path and was not named before; "
                f"known: {', '.join(self._folders) or 'none'}",
                "lora_request",
            )
        with self._guard:
            self._check_number(request)
            self._numbers[request.lora_int_id] = request.lora_name
        return request.lora_name

    def _check_number(self, request: LoRARequest) -> None:
        known = self._numbers.get(request.lora_int_id, request.lora_name)
        if known != request.lora_name:
            raise RequestError(
                f"lora_int_id {request.lora_int_id} is the adapter {known!r}, and "
                f"{request.lora_name!r} is another; give each its own number",
                "lora_request",
            )

    def fetch(self, name: str, used: Collection[str], *, wait: float) -> bool:
        """True if passes may use an adapter; if it is not in memory, a thread begins to read it.

        It replaces the least recently used ones that are not in `used`. The call waits `wait` seconds for the
        thread. It returns True, too, if the adapter cannot be read: `rows` then raises the reason.
        """
        with self._guard:
            if name not in self._resident and name not in self._failed and self._fetching is None:
                self._make_room({name}, used)
                reader = threading.Thread(target=self._fetch, args=(name,), daemon=True)
                reader.start()  # it waits for the guard before it resets the field
                self._fetching = reader
            thread = self._fetching
        if wait and thread is not None:
            thread.join(wait)
        return name in self._resident or name in self._failed

    def _fetch(self, name: str) -> None:
        try:
            self._load_missing({name})
        except Exception as error:  # `rows` raises it for the requests that wait
            self._failed[name] = error if isinstance(error, AdapterError) else AdapterError(repr(error), name)
        finally:
            with self._guard:
                self._fetching = None

    def rows(self, adapted: Sequence[tuple[range, str]], count: int) -> AdaptedRows | None:
        """The adapted rows of a pass of `count` rows, from ranges and adapter names; None if there are none.

        Reads adapters that `fetch` has not read, as for another engine. Raises AdapterError if one cannot be
        read.
        """
        if not adapted:
            return None
        names = {name for _, name in adapted}
        for name in names & self._failed.keys() - self._resident.keys():
            raise self._failed.pop(name)
        with self._guard:
            found = {name: self._resident[name] for name in names if name in self._resident}
            for name in found:
                self._resident.move_to_end(name)
        if len(found) < len(names):
            found = self._load_missing(names)
        spans = [Span(rows, found[name]) for rows, name in adapted]
        return AdaptedRows.of(spans, count, self._library)

    def _make_room(self, names: Collection[str], used: Collection[str] = ()) -> list[str]:
        """Drop the least recently used adapters, but none in `used`; returns the names to read."""
        lacking = [name for name in names if name not in self._resident]
        for name in [one for one in self._resident if one not in names and one not in used]:
            if len(self._resident) + len(lacking) > self._limit:
                del self._resident[name]
        return lacking

    def _load_missing(self, names: Collection[str]) -> dict[str, Adapter]:
        with self._reading:
            with self._guard:
                lacking = self._make_room(names)
                found = {name: self._resident[name] for name in names if name not in lacking}
            for name in lacking:
                try:
                    found[name] = self._loaded(self._folders[name])
                except (ModelError, OSError) as error:
                    raise AdapterError(str(error), name) from error
                with self._guard:
                    self._resident[name] = found[name]
                    self._failed.pop(name, None)
            return found

    def _loaded(self, folder: PeftFolder) -> Adapter:
        return folder.load(self._weights, self._device, self._library)
