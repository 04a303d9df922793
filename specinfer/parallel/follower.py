"""A follower: rank 1, 2, ... of a model: `python -m specinfer.parallel.follower SOCKET [MEMORY]`.

It loads its part of the model, and runs what rank 0 says until that closes the link or ends. What cannot be
gone on with ends the process: rank 0 finds out, and starts all of them anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from specinfer.attention.native import NativeAttention
from specinfer.attention.sdpa import SdpaAttention
from specinfer.errors import PeerLostError, SpecInferError
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.quantized import NativeProducts
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import load_model, open_model
from specinfer.parallel.group import Group
from specinfer.parallel.launch import PEER_LOST
from specinfer.parallel.link import Link
from specinfer.parallel.share import Layout
from specinfer.runtime.executor import ModelRunner
from specinfer.runtime.sharded import Close, Logits, MessageReader, Open, Pass, identity_of, widths_of
from specinfer.speculation_config import Quantization

_LOG = logging.getLogger(__name__)
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG
_FAILED: Final = 70  # the status with which it ends that finds a bug or a message that is none
_CANNOT_LOAD: Final = 2  # and that of one that cannot load its part


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a follower loads, and how it computes: all of it as rank 0 has found it to be."""

    rank: int
    size: int
    bounds: Sequence[int]  # of its stages, as Layout has them
    model: str  # its path
    quantization: Quantization
    dtype: str  # of activations: bfloat16 or float32
    native: bool  # whether kernels are native ones
    native_attention: bool
    nontemporal: bool  # whether products read weights past the caches
    threads: int
    whole_table: bool  # whether each rank has all embeddings
    limit: float  # seconds that an exchange may take

    @property
    def layout(self) -> Layout:
        """Which layers are whose."""
        return Layout(self.size // (len(self.bounds) - 1), tuple(self.bounds))

    def group(self, link: Link, kernels: Kernels, memory: int | None = None) -> Group:
        """Its place among the ranks: `link` leads to rank 0, `memory` is a file that its stage shares."""
        layout, exchange = self.layout, None
        if memory is not None and kernels.library is not None:
            place = self.rank % layout.width
            exchange = SharedExchange(kernels.library, memory, layout.width, place, limit=self.limit)
        how: dict[str, Any] = {"limit": self.limit, "exchange": exchange, "bounds": layout.bounds}
        return Group(self.rank, self.size, [link], **how)

    def kernels(self) -> Kernels:
        """The kernels that rank 0 has for its part."""
        kernels = choose_kernels("native" if self.native else "torch", torch.device("cpu"))[0]
        if isinstance(kernels.products, NativeProducts):
            kernels = replace(kernels, products=kernels.products.but(nontemporal=self.nontemporal))
            assert kernels.library is not None
            kernels.library.set_threads(self.threads)
        if isinstance(kernels.attention, NativeAttention) and not self.native_attention:
            kernels = replace(kernels, attention=SdpaAttention())
        torch.set_num_threads(1 if self.native_attention else self.threads)
        return kernels

    def load(self, kernels: Kernels, group: Group) -> LanguageModel:
        """The part of the model that is this rank's."""
        opened = open_model(Path(self.model))
        return load_model(
            opened,
            dtype=getattr(torch, self.dtype),
            device=torch.device("cpu"),
            kernels=kernels,
            quantization=self.quantization,
            part=self.layout.part(self.rank, opened.config, whole_table=self.whole_table),
            group=group,
        )

    def to_json(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


@torch.inference_mode()
def follow(group: Group, model: LanguageModel) -> None:
    """Run what rank 0 says until it closes the link.

    Raises ValueError for a message that is none or does not fit, PeerLostError where a rank is lost.
    """
    reader, widths = MessageReader(model.config, model.dtype), widths_of(model, group)
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
                model, num_blocks=command.blocks, block_size=command.block_size
            )
        elif isinstance(command, Close):
            del caches[command.cache], runners[command.cache]
        elif isinstance(command, Pass):
            read = runners[command.cache].follow(command.rows, command.taps, logits=command.logits)
            if read.tapped_TND is not None:
                group.answer(read.tapped_TND)
            if read.logits_RV is not None:
                group.gather(read.logits_RV, widths)
        elif isinstance(command, Logits):
            bits = torch.from_numpy(command.bits.copy()).view(command.rows, -1)
            group.gather(model.logits(bits.view(model.dtype)), widths)
        else:
            runners[command.cache].cache.move(command.sources, command.targets)


def main() -> None:
    """Be the follower at the other end of an inherited socket, with memory that is inherited, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, *memory = map(int, sys.argv[1:])
    link = Link(socket.socket(fileno=number))
    _end_with(link)
    try:
        settings = Settings(**json.loads(link.receive()))
        try:
            kernels = settings.kernels()
            group = settings.group(link, kernels, *memory)
            model = settings.load(kernels, group)
        except Exception as error:  # whatever it is, rank 0 says so
            told = str(error) if isinstance(error, SpecInferError) else repr(error)
            link.send(json.dumps({"failed": told}).encode())
            os._exit(_CANNOT_LOAD)
        identity = identity_of(model, Path(settings.model), settings.quantization, group)
        link.send(json.dumps({"identity": identity}).encode())
        group.connect(json.loads(link.receive())["meet"])
        group.seconds(model.config.hidden_size)
        group.hop_seconds(model.config.hidden_size, model.dtype)
        follow(group, model)
    except (EOFError, OSError):  # rank 0 has gone
        os._exit(0)
    except PeerLostError:
        os._exit(PEER_LOST)
    except BaseException:
        _LOG.exception("a rank ends")
        os._exit(_FAILED)
    os._exit(0)  # nobody waits for what is left


def _end_with(link: Link) -> None:
    """End this process with rank 0: when the other end of the link is closed, whatever is computed then."""
    if sys.platform == "linux":  # a process that is stopped notices nothing by itself
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    threading.Thread(target=_watch, args=(link.number,), name="watch", daemon=True).start()


def _watch(number: int) -> None:
    poll = select.poll()
    poll.register(number, 0)  # what is always told: that the other end is closed
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
