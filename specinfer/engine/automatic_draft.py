"""The draft that `auto` chooses for a target; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from specinfer.config import EngineConfig
from specinfer.errors import CapacityError, ConfigError, ModelError
from specinfer.hub.catalogue import heads_of
from specinfer.hub.known_drafts import drafts_for, local_drafts
from specinfer.hub.model_files import ModelFiles
from specinfer.progress import format_bytes
from specinfer.speculation_config import AUTO, OWN_HEAD

_T = TypeVar("_T")
FAULTS: Final = (ModelError, ConfigError, CapacityError)  # that a draft may cause


def is_automatic(config: EngineConfig) -> bool:
    """True if the engine chooses the draft."""
    return config.speculation.drafts == (AUTO,)


def with_drafts(config: EngineConfig, drafts: tuple[str, ...]) -> EngineConfig:
    """Return the config with these drafts."""
    return replace(config, speculation=replace(config.speculation, drafts=drafts))


def automatic_drafts(
    config: EngineConfig,
    target: ModelFiles,
    room: int,
    say: Callable[[str], object],
    *,
    own_head: int | None = None,
) -> tuple[str, ...]:
    """Return the names of the drafts for a target, or (); a line says which, or how to fetch one.

    The order: the package's head for the model, an MTP head of `own_head` bytes in the target's files, and
    the known drafts on this machine. `room` is the memory in bytes beside the target; a draft may take half
    of it, as texts need the rest. With `offload` the memory plan decides whether the target itself is the
    draft.
    """
    if config.speculation.node_limit < 2:  # no room for a guess
        return ()
    if heads := heads_of(config.model):
        return heads
    if config.offload != "never":
        return ()
    name = Path(config.model).name or config.model
    if config.tensor_parallel > 1:  # ranks cannot divide it
        own_head = None
    too_large: list[str] = []
    for draft, size, option in _candidates(target, own_head):
        if 2 * size <= room:
            say(f"{name}: its draft is {draft}; --no-draft leaves it out")
            return (option,)
        too_large.append(draft)
    if too_large:
        say(
            f"{name}: no draft; {too_large[0]} does not fit into half of the "
            f"{format_bytes(max(room, 0))} that are free"
        )
    elif rows := drafts_for(target):
        row = rows[0]
        say(
            f"{name}: {row.name_for(target)} ({row.size}) can be its draft; "
            f"`specinfer pull {config.model} --with-draft` fetches it"
        )
    return ()


def _candidates(target: ModelFiles, own_head: int | None) -> Iterator[tuple[str, int, str]]:
    """Yield the drafts on this machine, the best first: name for people, bytes, and option."""
    if own_head is not None:
        yield "the MTP head in its own files", own_head, OWN_HEAD
    for draft in local_drafts(target):
        yield str(draft), draft.bytes, str(draft.path)


def without_faulty(
    config: EngineConfig, plan: Callable[[EngineConfig], _T], say: Callable[[str], object]
) -> _T:
    """Call `plan` with the config of an automatic draft; if that fails, call it again without drafts.

    Raises the error of the last call.
    """
    if not config.speculation.drafts:
        return plan(config)
    try:
        return plan(config)
    except FAULTS as error:
        reason = left_out(error)
    result = plan(with_drafts(config, ()))
    say(reason)
    return result


def left_out(error: Exception) -> str:
    """Return the line for an automatic draft with this fault."""
    return f"the automatic draft is left out: {error}"
