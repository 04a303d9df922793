"""Observer: whoever wants to hear of every completion while it is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol

from specinfer.errors import ConfigError
from specinfer.serve.config import ServeConfig
from specinfer.serve.metrics import Metrics
from specinfer.serve.work import Delta, Work
from specinfer.tokenizer import Tokenizer


class Observation(Protocol):
    """One completion, as somebody sees it; times are of the monotonic clock.

    Both methods are called on the server's event loop, so neither waits for anything.
    """

    def delta(self, delta: Delta, now: float) -> None:
        """Take in a delta that arrived now."""
        ...

    def end(self, now: float) -> None:
        """Take note that nothing follows: the last delta had a finish reason, or nobody reads on."""
        ...


class Observer(Protocol):
    """Observes each completion."""

    def observe(self, work: Work, now: float) -> Observation:
        """The observation of a completion that begins now; `CALLER` is who asks for it."""
        ...

    def close(self) -> None:
        """Finish what is left to do; nothing is observed after it."""
        ...


@contextmanager
def observers(
    config: ServeConfig, model: str, metrics: Metrics, tokenizer: Tokenizer
) -> Iterator[Sequence[Observer]]:
    """The observers that the options ask for, until the block ends; raises ConfigError."""
    found: list[Observer] = []
    with ExitStack() as opened:
        if config.log_traffic is not None:
            from specinfer.serve.traffic_log import TrafficLog

            log = TrafficLog(
                config.log_traffic,
                config.log_traffic_size,
                model=model,
                tokenizer=tokenizer,
                lost=metrics.lose_traffic,
            )
            found.append(opened.enter_context(closing(log)))
        if config.otlp_endpoint is not None:
            try:
                from specinfer.serve.spans import open_spans

                spans = open_spans(config.otlp_endpoint, model)
            except ImportError as error:
                raise ConfigError(
                    f"{error.name} is not installed; otlp_endpoint needs it: pip install 'specinfer[otel]'"
                ) from None
            found.append(opened.enter_context(closing(spans)))
        yield found
