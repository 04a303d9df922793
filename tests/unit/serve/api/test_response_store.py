"""Responses that the store keeps and drops."""

from __future__ import annotations

import pytest

from specinfer.serve.api.responses import ResponseStore
from specinfer.serve.http.api_error import ApiError


def test_the_oldest_leave_where_all_are_too_large() -> None:
    store = ResponseStore(10, max_bytes=250)
    for name, size in (("a", 30), ("b", 30), ("c", 30), ("d", 300)):
        store.keep(name, {}, [{"role": "user", "content": "x" * size}])
        if name == "c":
            assert store.get("a").body == b"{}"
    for gone in "abc":
        with pytest.raises(ApiError):
            store.get(gone)
    assert store.get("d").body == b"{}"  # the newest stays, whatever its size
    store.forget("d")
    store.keep("e", {}, [])
    assert store.conversation("e") == ()
