"""Who asks: what of a request's HTTP is wanted where its answers are made, and what it is told of them."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Caller:
    """The request that an answer belongs to."""

    request_id: str = ""  # of the server's making; "" where nobody asks over HTTP
    path: str = ""
    key: int = 0  # which of the API keys it was asked with, from 1; 0: none was asked for
    traceparent: str = ""  # the W3C header, as it came
    tracestate: str = ""


# Each request is answered in a context of its own, so endpoints need not hand this on.
CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen
# Set when the engine has admitted the request; a stream waits for it before it sends its headers.
ADMITTED: Final[ContextVar[asyncio.Event | None]] = ContextVar("admitted", default=None)
