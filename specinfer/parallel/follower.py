"""The process of rank 1, 2, ...: `python -m specinfer.parallel.follower JSON` (parallel/processes.py).

It loads its part of the model and runs rank 0's commands until rank 0 closes the link or exits. An
unrecoverable error ends the process; rank 0 detects that and restarts all ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from specinfer.attention.sdpa import SdpaAttention
from specinfer.errors import CapacityError, ModelError, PeerLostError, SpecInferError
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.choice import Kernels, choose_kernels, draft_kernels
from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.machine import thread_count
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.shard import Layout
from specinfer.models.weight_memory import Shared
from specinfer.models.weight_sizes import part_bytes
from specinfer.models.weights import load_model, prepare
from specinfer.parallel.listener import CANNOT_LOAD, FAILED, PEER_LOST, SILENCE
from specinfer.runtime.kv_cache import free_bytes, gib
from specinfer.runtime.runner import ModelRunner
from specinfer.runtime.sharded import (
    Close,
    Logits,
    MessageReader,
    Moves,
    Open,
    Pass,
    ReportTimes,
    identity_of,
    widths_of,
)
from specinfer.speculation_config import Quantization
from specinfer.transport.group import LAST, Group
from specinfer.transport.link import Link, read_key
from specinfer.version import VERSION

_LOG = logging.getLogger(__name__)
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG


class SharedDraft(NamedTuple):
    """A draft that the ranks of the first stage share, with rank 0's choices."""

    path: str  # "": the draft shares the target's weights
    quantization: Quantization
    native_attention: bool
    nontemporal: bool

    def load(self, target: Path, model: LanguageModel, settings: Settings, kernels: Kernels) -> LanguageModel:
        """Load this rank's part; `model` is the target."""
        opened = open_model(Path(self.path or target), max_context=settings.max_context)
        layout = settings.layout.of_draft(opened.config, exact=self.quantization == "int8")
        return load_model(
            opened,
            dtype=model.dtype,
            device=model.device,
            kernels=draft_kernels(settings.fitting(kernels, self.native_attention, self.nontemporal)),
            quantization=self.quantization,
            shared=None if self.path else Shared(model.table),
            keep=settings.keep,
            part=layout.part(settings.rank, opened.config),
            group=model.group,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Rank 0's choices for a follower: the model, and how to compute."""

    rank: int
    model: str  # path, for a process that was started without one
    size: int
    bounds: Sequence[int]  # first layers of the stages, as in Layout
    quantization: Quantization
    dtype: str  # dtype of activations: bfloat16 or float32
    native: bool  # use the native kernels
    native_attention: bool
    nontemporal: bool  # products read weights with nontemporal loads
    int8_cache: bool  # of K and V
    keep: bool  # write prepared files
    threads: int | None  # None: an equal share of the host's cores
    max_context: int | None  # tokens of the longest text; None: the model's limit
    same_host: int  # ranks on its host
    shared: bool  # the stage exchanges through shared memory
    sum_parts: int  # parts of float sums
    whole_table: bool  # each rank has the whole embedding table
    drafts: Sequence[SharedDraft]  # drafts shared by the first stage
    limit: float  # timeout of an exchange, in seconds

    @classmethod
    def decode(cls, message: bytes) -> Settings:
        """Parse rank 0's message; raises ModelError if rank 0 has another version."""
        fields = json.loads(message)
        if (version := fields.pop("version", None)) != VERSION:
            raise ModelError(f"this rank has version {VERSION}, rank 0 has {version}; install the same one")
        fields["drafts"] = [SharedDraft(*one) for one in fields["drafts"]]
        return cls(**fields)

    @property
    def layout(self) -> Layout:
        """The assignment of layers to stages."""
        return Layout(self.size // (len(self.bounds) - 1), tuple(self.bounds), self.sum_parts)

    def group(self, link: Link, kernels: Kernels, memory: Mapping[str, int]) -> Group:
        """Join the ranks; `link` leads to rank 0, `memory` maps first ranks of stages to shared files."""
        layout, exchange = self.layout, None
        if self.shared and layout.width > 1:
            assert kernels.library is not None, "sharing memory needs the native library"
            place = self.rank % layout.width
            file = memory[str(self.rank - place)]
            exchange = SharedExchange(kernels.library, file, layout.width, place, limit=self.limit)
        how: dict[str, Any] = {"limit": self.limit, "exchange": exchange, "bounds": layout.bounds}
        return Group(self.rank, self.size, [link], **how)

    def kernels(self) -> Kernels:
        """The kernels of this machine, set to its number of threads."""
        kernels = choose_kernels("native" if self.native else "torch", torch.device("cpu"))[0]
        if kernels.library is not None:
            kernels.library.set_threads(self.cores)
        native = self.native_attention and all(draft.native_attention for draft in self.drafts)
        torch.set_num_threads(1 if native else self.cores)
        return replace(kernels, int8_cache=self.int8_cache)

    def fitting(self, kernels: Kernels, native_attention: bool, nontemporal: bool) -> Kernels:
        """Adapt kernels to a model as rank 0 has chosen."""
        kernels = replace(kernels, products=kernels.products.but(nontemporal=nontemporal))
        if isinstance(kernels.attention, NativeAttention) and not native_attention:
            kernels = replace(kernels, attention=SdpaAttention())
        return kernels

    @property
    def cores(self) -> int:
        """Number of compute threads."""
        return thread_count(self.threads, self.same_host)

    def load(self, model: Path, kernels: Kernels, group: Group) -> LanguageModel:
        """Load this rank's part of the model."""
        opened = open_model(model, max_context=self.max_context)
        dtype = getattr(torch, self.dtype)
        part = self.layout.part(self.rank, opened.config, whole_table=self.whole_table)
        needed = part_bytes(opened, part, dtype, kernels, self.quantization)
        free = free_bytes(torch.device("cpu"))
        if needed > free:
            raise CapacityError(f"the weights need {gib(needed)}, but {gib(free)} of memory are free")
        if (
            self.layout.stages > 1 and self.quantization not in ("none", "gguf") and self.keep
        ):  # the other stages' files do not exist yet
            with contextlib.suppress(ModelError):
                prepare(opened, dtype=dtype, kernels=kernels, quantization=self.quantization)
        return load_model(
            opened,
            dtype=dtype,
            device=torch.device("cpu"),
            kernels=self.fitting(kernels, self.native_attention, self.nontemporal),
            quantization=self.quantization,
            keep=self.keep,
            part=part,
            group=group,
        )


@torch.inference_mode()  # only here, since threads that read weights write to normal tensors
def follow(group: Group, models: Sequence[LanguageModel]) -> None:
    """Run rank 0's commands on the target and shared drafts until the link is closed.

    Raises ValueError for an invalid message, PeerLostError if a rank is lost.
    """
    reader = MessageReader([model.config for model in models], models[0].dtype)
    caches: dict[int, Open] = {}
    runners: dict[int, ModelRunner] = {}
    while True:
        try:
            message = group.receive()
        except EOFError:
            return
        command = reader.read(message, caches)
        if isinstance(command, Open):
            caches[command.cache] = command
            runners[command.cache] = ModelRunner(
                models[command.model],
                num_blocks=command.blocks,
                block_size=command.block_size,
                states=command.states,
            )
        elif isinstance(command, Close):
            del caches[command.cache], runners[command.cache]
        elif isinstance(command, ReportTimes):
            group.send_reply(torch.tensor(group.times.spent, dtype=torch.float64))
        else:
            with group.times.passing():
                _run(command, runners[command.cache], group)


def _run(command: Pass | Logits | Moves, runner: ModelRunner, group: Group) -> None:
    """Run a command on this rank's part of a cache."""
    model = runner.model
    if isinstance(command, Pass):
        read = runner.follow(command.rows, command.taps, logits=command.logits, more=command.more)
        if read is None:
            return
        if read.tapped_TND is not None:
            group.send_reply(read.tapped_TND)
        if read.logits_RV is not None:
            group.gather(read.logits_RV, widths_of(model, group))
    elif isinstance(command, Logits):
        bits = torch.from_numpy(command.bits.copy()).view(command.rows, -1)
        group.gather(model.logits(bits.view(model.dtype)), widths_of(model, group))
    else:
        runner.copy(*command[1:])


def main() -> None:
    """Entry point: the inherited file descriptors are the link to rank 0 and shared memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")  # rank 0 logs the warnings of all
    options = json.loads(sys.argv[1])
    failed = threading.Event()
    try:
        link = Link.of(options["link"])
        hosts = link.hosts
        if hosts is not None:  # no limit for sending: rank 0 may read late, after the rest of a pass
            link.within(SILENCE, sending=False)
        _end_with(link, options["parent"], failed)
        message = link.receive()
        try:
            key = None if options["key_file"] is None else read_key(options["key_file"])
            settings = Settings.decode(message)
            path = Path(options["model"] or settings.model)
            kernels = settings.kernels()
            group = settings.group(link, kernels, options["memory"])
            model = settings.load(path, kernels, group)
            drafts = [draft.load(path, model, settings, kernels) for draft in settings.drafts]
        except Exception as error:  # any error is reported to rank 0
            why = str(error) if isinstance(error, SpecInferError) else repr(error)
            if hosts is not None:  # before rank 0 reads the message and ends this process
                _LOG.error("cannot load the model: %s", why)
            failed.set()
            link.send_last(json.dumps({"failed": why}).encode(), LAST)
            os._exit(CANNOT_LOAD)
        identity = identity_of(model, path, settings.quantization, group)
        free = free_bytes(torch.device("cpu"))
        link.send(json.dumps({"identity": identity, "free": free}).encode())
        address = json.loads(link.receive())["meet"]
        group.connect(address if hosts is None else hosts[0], key)
        group.seconds(model.config.hidden_size)
        group.hop_seconds(model.config.hidden_size, model.dtype)
        follow(group, [model, *drafts])
    except (EOFError, OSError):  # rank 0 has exited
        os._exit(0)
    except PeerLostError:
        os._exit(PEER_LOST)
    except BaseException:
        _LOG.exception("the rank ends after an error")
        os._exit(FAILED)
    os._exit(0)  # skip cleanup


def _end_with(link: Link, parent: int, failed: threading.Event) -> None:
    """End this process when its parent ends or the link is closed, whatever it is doing.

    After `failed` is set, the process ends by itself.
    """
    if sys.platform == "linux":  # a stopped process would not notice otherwise
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before
            os._exit(0)
    threading.Thread(target=_watch, args=(link, failed), name="watch", daemon=True).start()


def _watch(link: Link, failed: threading.Event) -> None:
    link.wait_for_end()
    if not failed.is_set():
        os._exit(0)


if __name__ == "__main__":
    main()
