"""The draft that `auto` chooses for a target; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
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
_FAULTS: Final = (ModelError, ConfigError, CapacityError)  # that a draft may cause


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
    own_head: bool = False,
) -> tuple[str, ...]:
    """Return the names of the drafts for a target, or (); a line says which, or how to fetch one.

    The order: the package's head for the model, an MTP head in the target's files (`own_head`), and the first
    known draft on this machine that fits. `room` is the memory in bytes beside the target; a draft may take
    half of it, as texts need the rest. With `offload` the memory plan decides whether the target itself is
    the draft.
    """
    if config.speculation.node_limit < 2:  # no room for a guess
        return ()
    if heads := heads_of(config.model):
        return heads
    if config.offload != "never":
        return ()
    name = Path(config.model).name or config.model
    if own_head and config.tensor_parallel == 1:  # ranks cannot divide it
        say(f"{name}: its draft is the MTP head in its own files; --no-draft leaves it out")
        return (OWN_HEAD,)
    drafts = local_drafts(target)
    if draft := next((one for one in drafts if 2 * one.bytes <= room), None):
        say(f"{name}: its draft is {draft}; --no-draft leaves it out")
        return (str(draft.path),)
    if drafts:
        say(
            f"{name}: no draft; {drafts[0]} does not fit into half of the "
            f"{format_bytes(max(room, 0))} that are free"
        )
    elif rows := drafts_for(target):
        row = rows[0]
        say(
            f"{name}: {row.name_for(target)} ({row.size}) can be its draft; "
            f"`specinfer pull {config.model} --with-draft` fetches it"
        )
    return ()


def without_faulty(
    config: EngineConfig, load: Callable[[EngineConfig], _T], say: Callable[[str], object]
) -> _T:
    """Call `load` with the config of an automatic draft; if that fails, call it again without drafts.

    Raises the error of the last call.
    """
    if not config.speculation.drafts:
        return load(config)
    try:
        return load(config)
    except _FAULTS as error:
        reason = str(error)
    result = load(with_drafts(config, ()))
    say(f"the automatic draft is left out: {reason}")
    return result
