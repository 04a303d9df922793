"""AltUp: the sizes of the residual streams of a Gemma 3n."""

from dataclasses import dataclass
from typing import Final

from specinfer.errors import ModelError

_MOST_STREAMS: Final = 8  # as in kernels/cpu/layer_ops.h


@dataclass(frozen=True, slots=True)
class AltUp:
    """The streams of a Gemma 3n (altup.py)."""

    streams: int
    active: int  # the one that layers compute
    scaled: bool  # the active stream is scaled before it makes the term of per-layer inputs
    rank: int  # of the product beside attention
    # For each layer the standard deviations above the mean of a row's gates below which they become 0; 0:
    # none does.
    sparsity: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams <= _MOST_STREAMS:
            raise ModelError(
                f"altup_active_idx is {self.active} and altup_num_inputs {self.streams}; allowed: up to "
                f"{_MOST_STREAMS} inputs, and an index below that. The config is damaged."
            )
