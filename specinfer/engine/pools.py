"""Pools among the drafts of a config: their members stand for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specinfer.config import EngineConfig
from specinfer.errors import ModelError
from specinfer.hub import resolve
from specinfer.hub.pool import is_pool, member_folders, read_pool
from specinfer.models.fingerprint import fingerprint
from specinfer.models.weights import open_model
from specinfer.progress import Progress


def with_members(config: EngineConfig, progress: Progress) -> EngineConfig:
    """The config with the members of each pool in its place, in their order.

    A pool is a folder with a pool.json. Raises ModelError and its kind for one that is damaged, or was tuned
    for another target.
    """
    if not any(is_pool(Path(name).expanduser()) for name in config.speculation.drafts):
        return config
    own = fingerprint(open_model(resolve(config.model, progress=progress)))
    drafts: list[str] = []
    for name in config.speculation.drafts:
        folder = Path(name).expanduser()
        if not is_pool(folder):
            drafts.append(name)
            continue
        pool = read_pool(folder)
        if pool.fingerprint != own:
            raise ModelError(
                f"the pool {name} was tuned for {pool.target}, whose weights are others than those of "
                f"{Path(config.model).name}; name that model, or a pool of this one. A member that is a "
                "small model can be named by itself"
            )
        drafts += [str(path) for path in member_folders(folder, pool)]
    return replace(config, speculation=replace(config.speculation, drafts=tuple(drafts)))
