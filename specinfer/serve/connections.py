"""Connections: all of a server's, how many there may be, and how much of their requests is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specinfer.serve.api_error import ApiError

if TYPE_CHECKING:
    from specinfer.serve.connection import Connection

SPARE: Final = 64  # connections beyond the limit that are told so, and probes among them are answered


class Connections:
    """Counts connections and the bytes of requests that are not answered yet. Belongs to one event loop."""

    def __init__(self, most: int, most_bodies: int) -> None:
        self._most = most
        self._most_bodies = most_bodies
        self._all: set[Connection] = set()
        self._unused: dict[Connection, None] = {}  # no whole request has come from them; the oldest first
        self._held: dict[Connection, int] = {}  # bytes of requests that are not answered
        self._total = 0

    @property
    def size(self) -> int:
        """How many connections there are."""
        return len(self._all)

    @property
    def held(self) -> int:
        """Bytes of all requests that are not answered."""
        return self._total

    def add(self, one: Connection) -> bool:
        """Take a new connection in; return whether it is one too many, which is told so when it asks.

        At the limit the oldest connection that has not sent a whole request leaves for it. Where all have,
        there is room for `SPARE` more; beyond these the new one leaves at once.
        """
        if len(self._all) >= self._most and self._unused:
            self._dismiss(next(iter(self._unused)))
        if len(self._all) >= self._most + SPARE:
            one.close_now()
            return True
        over_limit = len(self._all) >= self._most
        self._all.add(one)
        self._unused[one] = None
        return over_limit

    def mark_used(self, one: Connection) -> None:
        """A whole request has come from this connection: it stays."""
        self._unused.pop(one, None)

    def mark_ending(self, one: Connection) -> None:
        """Nothing is read from this connection any more: it leaves before others do."""
        if one in self._all:
            self._unused[one] = None

    def remove(self, one: Connection) -> None:
        """This connection is lost."""
        self._all.discard(one)
        self._unused.pop(one, None)
        self.release(one, self._held.get(one, 0))

    def hold(self, one: Connection, size: int) -> None:
        """Count bytes of a request that have come.

        Where all are more than there may be, of the connections that are sending a body the one that takes
        most is refused, or this one where there is none.
        """
        self._held[one] = self._held.get(one, 0) + size
        self._total += size
        if self._total > self._most_bodies:
            largest = max((m for m in self._held if m.is_reading), key=lambda m: self._held[m], default=one)
            largest.refuse(
                ApiError(
                    f"requests that are not answered yet have more than {self._most_bodies} bytes, "
                    "--max-bodies-memory, and this one most of them; come again",
                    status=503,
                    headers={"Retry-After": "5"},
                )
            )

    def release(self, one: Connection, size: int) -> None:
        """Bytes of a request are not kept any more."""
        if size:
            self._total -= size
            self._held[one] -= size
            if not self._held[one]:
                del self._held[one]

    def _dismiss(self, one: Connection) -> None:
        self._all.discard(one)
        self._unused.pop(one, None)
        one.close_now()
