"""AdapterShelf: the adapters of one model by name, a few of them in memory, others read when used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from specinfer.errors import AdapterError, ModelError, RequestError
from specinfer.kernels.library import Library
from specinfer.kernels.low_rank import PER_LAYER, AdaptedRows, Adapter, Span
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.config import ModelConfig
from specinfer.request import LoRARequest


class AdapterShelf:
    """Names adapters, checks them, and has those in memory that passes use. Any thread may call it.

    A name stands for the same numbers as long as the shelf is there: prefixes of texts that were computed
    with them are found by it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        library: Library | None,
        most: int,
        refused: str | None = None,
    ) -> None:
        """At most so many adapters are in memory at once, in `dtype`; `refused` says why there are none."""
        self._config = config
        self._dtype, self._device, self._library = dtype, device, library
        self._most = most
        self._refused = refused
        self._guard = threading.RLock()
        self._folders: dict[str, PeftFolder] = {}
        self._numbers: dict[int, str] = {}  # the names that go with the numbers callers give
        self._resident: OrderedDict[str, Adapter] = OrderedDict()  # the one used last comes last

    @property
    def names(self) -> Collection[str]:
        """Those that requests may name."""
        return self._folders.keys()

    @property
    def digests(self) -> Mapping[str, str]:
        """Hashes of their files, by name."""
        return {name: folder.digest() for name, folder in self._folders.items()}

    @property
    def missing_bytes(self) -> int:
        """The memory that adapters may yet take, of those that have been named."""
        sizes = sorted((folder.bytes(self._dtype) for folder in self._folders.values()), reverse=True)
        there = sum(self._folders[name].bytes(self._dtype) for name in self._resident)
        return max(0, sum(sizes[: self._most]) - there)

    def add(self, name: str, path: Path) -> None:
        """Name an adapter, which is checked, and read where there is room for one more.

        Raises ModelError for one that is not supported, and its kind for one that is damaged or of another
        model, or where the name stands for another folder.
        """
        path = path.expanduser().resolve()
        with self._guard:
            known = self._folders.get(name)
            if known is not None and known.path != path:
                raise ModelError(f"adapter {name!r} is {known.path}; give {path} another name")
            if known is not None:
                return
            if self._refused is not None:
                raise ModelError(f"adapter {name!r} cannot be used: {self._refused}")
            folder = PeftFolder(name, path, self._config)
            if len(self._resident) < self._most:
                self._resident[name] = self._loaded(folder)
            self._folders[name] = folder

    def named(self, request: LoRARequest) -> str:
        """The name of the adapter that a request asks for, which is added where it has a path.

        Raises RequestError for one that nobody has named, or whose number is another's, else as `add`.
        """
        with self._guard:
            known = self._numbers.get(request.lora_int_id, request.lora_name)
            if known != request.lora_name:
                raise RequestError(
                    f"lora_int_id {request.lora_int_id} is the adapter {known!r}, and "
                    f"{request.lora_name!r} is another; give each its own number",
                    "lora_request",
                )
            if request.lora_path:
                self.add(request.lora_name, Path(request.lora_path))
            elif request.lora_name not in self._folders:
                raise RequestError(
                    f"the adapter {request.lora_name!r} has no lora_path and was not named before; "
                    f"known: {', '.join(self._folders) or 'none'}",
                    "lora_request",
                )
            self._numbers[request.lora_int_id] = request.lora_name
        return request.lora_name

    def rows(self, adapted: Sequence[tuple[range, str]], count: int) -> AdaptedRows | None:
        """The rows of a pass of `count` that have adapters, by their names; None where no row has one.

        Adapters that are not there are read, in place of those that were used the longest time ago. Raises
        AdapterError where one cannot be read.
        """
        if not adapted:
            return None
        found = self._fetched({name for _, name in adapted})
        spans = [Span(rows, found[name]) for rows, name in adapted]
        return AdaptedRows.of(spans, count, self._library)

    def _fetched(self, names: Collection[str]) -> dict[str, Adapter]:
        with self._guard:
            for name in names:
                if name in self._resident:
                    self._resident.move_to_end(name)
            lacking = [name for name in names if name not in self._resident]
            while self._resident and len(self._resident) + len(lacking) > self._most:
                oldest = next(iter(self._resident))
                if oldest in names:
                    break
                del self._resident[oldest]
            for name in lacking:
                try:
                    self._resident[name] = self._loaded(self._folders[name])
                except (ModelError, OSError) as error:
                    raise AdapterError(str(error), name) from error
            return {name: self._resident[name] for name in names}

    def _loaded(self, folder: PeftFolder) -> Adapter:
        products = PER_LAYER * self._config.num_layers
        return folder.load(products, self._dtype, self._device, self._library)
