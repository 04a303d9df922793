"""Host headers: the name of another page that resolves to this machine is refused."""

from __future__ import annotations

import json

from specinfer.serve.http.access import Access, Hosts, Keys
from tests.unit.serve.http.test_access import ask, echo


def test_accepted_host_headers() -> None:
    cases: list[tuple[str, bool]] = [
        *(("localhost", True), ("localhost:8000", True), ("LocalHost.:1", True)),
        *(("127.0.0.1:8000", True), ("127.9.8.7", True), ("[::1]:8000", True), ("[::1]", True)),
        *(("mine.example", True), ("MINE.example:443", True), ("mine.example.:443", True)),
        *(("other.example:8000", True), ("10.1.2.3:8000", True), ("[fe80::1]:9", True)),
        *(("evil.example:8000", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False)),
        *(("10.1.2.4", False), ("[::2]:8000", False), ("0.0.0.0:8000", False)),
        *(("", False), (":8000", False), ("[", False), ("[::1", False), ("::1", False), ("[]", False)),
        *(
            ("localhost:8000:1", False),
            ("localhost:x", False),
            ("localhost/a", False),
            ("a@localhost", False),
        ),
        *(("localhost localhost", False), ("\xe9vil.example", False), ("*", False)),
    ]
    for host, admitted in cases:
        hosts = Hosts(["Mine.example", "other.example.", "10.1.2.3", "[fe80::1]"])
        assert hosts.admit(host.encode("latin-1")) is admitted, host


def test_when_names_are_looked_at() -> None:
    cases: list[tuple[list[str], bool, str, bool]] = [
        ([], False, "127.0.0.1", True),
        ([], False, "127.0.1.1", True),
        ([], False, "::1", True),
        ([], True, "127.0.0.1", False),
        ([], False, "0.0.0.0", False),
        ([], False, "192.0.2.1", False),
        (["a.example"], False, "192.0.2.1", True),
        (["a.example"], True, "127.0.0.1", True),
        (["*"], False, "127.0.0.1", False),
        (["a.example", "*"], False, "127.0.0.1", False),
    ]
    for allowed, keyed, address, checked in cases:
        hosts = Hosts.of("mybox", allowed, keyed=keyed, address=address)
        assert (hosts is not None) is checked, (allowed, keyed)
        if hosts is not None:
            assert hosts.admit(b"a.example") is ("a.example" in allowed), (allowed, keyed)
            assert hosts.admit(b"mybox:8000"), (allowed, keyed)
            assert not hosts.admit(b"evil.example"), (allowed, keyed)


def guarded(*keys: str) -> Access:
    return Access(
        echo, keys=Keys(keys), max_body=10, max_bodies=99, idle_timeout=5.0, hosts=Hosts(["mine.example"])
    )


def test_another_name_is_refused_before_anything_else_is_looked_at() -> None:
    for access in (guarded(), guarded("sesame")):
        status, _, body = ask(access, host="evil.example:8000", content_length="11")
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (421, "invalid_request_error")
        assert "'evil.example:8000'" in error["message"]
        assert "--allowed-host" in error["message"]
    assert ask(guarded(), host="mine.example:8000")[0] == 200
    assert ask(guarded(), host="evil.example", path="/page/main.js")[0] == 421
    assert ask(guarded())[0] == 421
    long = ask(guarded(), host="x" * 60_000)[2]
    assert len(long) < 1000
