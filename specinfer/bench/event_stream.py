"""Server-sent events out of bytes, however the network cuts them."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Puts packets together and gives back the data of whole events.

    Comments (servers send them to keep a connection open) and the fields `event`, `id` and `retry` are
    skipped. Lines may end with CRLF, LF or CR, a packet may end anywhere, within a character as well.
    """

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._lines = 0
        self._data: list[str] = []  # of an event that has not ended

    def feed(self, packet: bytes) -> list[str]:
        """The data of the events that `packet` completes, in order."""
        pending = self._rest + packet
        held = b"\r" if pending.endswith(b"\r") else b""  # the next packet may begin with the LF of a CRLF
        *lines, rest = _LINE_END.split(pending[: len(pending) - len(held)])
        self._rest = rest + held
        return self._read(lines)

    def close(self) -> list[str]:
        """The data of an event that the end of the stream completes: its blank line may be missing."""
        lines, self._rest = _LINE_END.split(self._rest), b""
        return self._read([*lines, b""])

    def _read(self, lines: list[bytes]) -> list[str]:
        events = []
        for line in lines:
            if self._lines == 0:
                line = line.removeprefix(_BOM)
            self._lines += 1
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
                continue
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
        return events
