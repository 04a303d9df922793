"""ResponseStore: the last responses, by id, for the requests that go on from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specinfer.serve.api_error import ApiError, cut
from specinfer.serve.caller import CALLER

_MOST_BYTES: Final = 256 << 20  # of all responses together, about


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes  # the response, as JSON
    messages: tuple[Mapping[str, Any], ...]  # the conversation with its answer, without instructions
    items: tuple[Mapping[str, Any], ...]  # of its own input
    size: int


class ResponseStore:
    """Keeps up to `most` responses, in memory; the oldest leave first. Belongs to one event loop.

    They leave as well when all of them have more than `most_bytes`, but for the newest. A response belongs
    to the API key that it was asked with: for callers with another key there is none of that id.
    """

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[tuple[int, str], _Kept] = {}  # by the number of the key and the id; the oldest first
        self._size = 0

    def wants(self, asked: bool | None) -> bool:
        """Whether a response is kept whose request says so of `store`; raises ApiError where it cannot be."""
        if asked and not self._most:
            raise ApiError("store is true, and this server keeps no responses; drop it", param="store")
        return asked is not False and bool(self._most)

    def keep(
        self,
        name: str,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        items: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep a response that has ended, with the conversation it belongs to and the items of its input."""
        body = json.dumps(response, ensure_ascii=False).encode()
        # Messages are shared with the responses before: they are counted once too often, not too rarely.
        size = len(body) + sum(len(str(one)) for one in (*messages, *items))
        self._kept[CALLER.get().key, name] = _Kept(body, tuple(messages), tuple(items), size)
        self._size += size
        while len(self._kept) > self._most or (self._size > self._most_bytes and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def conversation(self, name: str) -> tuple[Mapping[str, Any], ...]:
        """The messages that a response with this `previous_response_id` goes on from."""
        kept = self._kept.get((CALLER.get().key, name))
        if kept is None:
            raise ApiError(
                f"there is no response {cut(name)!r}: it was not stored, or has left; send the whole "
                "conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.messages

    def body(self, name: str) -> bytes:
        """The response as JSON; raises ApiError where there is none of that id."""
        return self._of(name).body

    def check(self, name: str) -> None:
        """Raise ApiError where there is no response of that id."""
        self._of(name)

    def page(self, name: str, *, after: str | None, limit: int, order: str) -> dict[str, Any]:
        """Some items of a response's input, in OpenAI's shape of a list: those behind the one called `after`.

        Raises ApiError where there is no such response, or no such item in it.
        """
        items = list(self._of(name).items)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise ApiError(
                    f"after is {cut(after)!r}, which is no item of this response's input", param="after"
                )
            items = items[ids.index(after) + 1 :]
        shown = items[:limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else "",
            "last_id": shown[-1]["id"] if shown else "",
            "has_more": len(items) > limit,
        }

    def forget(self, name: str) -> None:
        """Let a response go; raises ApiError where there is none of that id."""
        self.check(name)
        self._drop((CALLER.get().key, name))

    def _of(self, name: str) -> _Kept:
        kept = self._kept.get((CALLER.get().key, name))
        if kept is None:
            raise ApiError(
                f"there is no response {cut(name)!r}: it was not stored, or has left",
                status=404,
                code="response_not_found",
            )
        return kept

    def _drop(self, place: tuple[int, str]) -> None:
        self._size -= self._kept.pop(place).size
