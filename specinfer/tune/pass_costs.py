"""What passes of a tuned target and its drafts cost here, measured as an engine measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from specinfer.config import EngineConfig
from specinfer.engine.build import Curves, measured_curves
from specinfer.engine.drafts import make_draft
from specinfer.engine.models import load_models, threads_of_torch
from specinfer.progress import Progress
from specinfer.runtime.executor import LocalExecutor
from specinfer.runtime.flight import torch_threads

_ROWS: Final = 256  # of the largest pass that is measured, at least


def measured_costs(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> Curves:
    """Costs of the config's target and of these drafts, each kept as the target is: int8 beside int8.

    They are named as an engine's drafts are, in their order. Raises as `load_models`.
    """
    speculation = replace(
        config.speculation,
        drafts=tuple(str(draft) for draft in drafts),
        draft_quantization=config.quantization,
    )
    wanted = replace(config, speculation=speculation)
    models = load_models(wanted, progress)
    size = config.cache.block_size
    blocks = -(-_ROWS // size)
    executor = LocalExecutor(models.target, num_blocks=blocks, block_size=size)
    runners = {
        name: make_draft(
            *(name, model, executor, speculation, models.named.get(name)),
            max_rows=config.scheduler.max_step_tokens,
        )[0]
        for name, model in models.drafts.items()
    }
    with torch_threads(threads_of_torch(wanted, models)):
        return measured_curves(wanted, executor, models, runners, progress)
