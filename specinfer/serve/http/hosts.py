"""Check of the Host header, against DNS rebinding.

A page of another site may point its own host name at this machine after it has loaded. Browsers then treat
this server as the page's origin and let the page read every answer. But Host still has the page's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final

ANY: Final = "*"  # as an allowed name: any Host header is accepted
_NAME: Final = re.compile(r"[0-9a-z._-]+", re.IGNORECASE)
_HOST: Final = re.compile(rf"({_NAME.pattern}|\[[0-9a-f:.]+\])(:[0-9]*)?", re.IGNORECASE)  # port optional


class Hosts:
    """Accepted host names and addresses of a server, in addition to loopback names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_plain, names))

    @classmethod
    def of(cls, bound: str, allowed: Sequence[str], *, keyed: bool, address: str) -> Hosts | None:
        """Return the names of a server bound to `bound`, whose address is `address`; None: any Host.

        A page of another site has no API key, so servers with keys check Host only if `allowed` names some.
        The same holds for servers on other than loopback addresses, whose names are unknown here.
        """
        if ANY in allowed or not (allowed or (not keyed and is_loopback(address))):
            return None
        return cls((bound, *allowed))

    def admit(self, header: bytes) -> bool:
        """Return whether a Host header has an accepted or loopback name, with any port."""
        found = _HOST.fullmatch(header.decode("latin-1"))
        if found is None:
            return False
        name = _plain(found[1])
        return name in self._names or is_loopback(name)


def is_origin_of(origin: str, header: str) -> bool:
    """Return whether an Origin header names the same server as the Host header `header`.

    A TLS proxy may omit the port in Host if Origin has none either.
    """
    scheme, found, rest = origin.partition("://")
    own, host = _HOST.fullmatch(rest), _HOST.fullmatch(header)
    if not found or own is None or host is None or _plain(own[1]) != _plain(host[1]):
        return False
    ports = [one[2].removeprefix(":") if one[2] else "" for one in (own, host)]
    usual = {"http": "80", "https": "443"}.get(scheme.lower(), "")
    return len({port or usual for port in ports}) == 1


def is_host(text: str) -> bool:
    """Return whether a text is a host name or an address without a port."""
    return _NAME.fullmatch(text) is not None or _is(ip_address, text.removeprefix("[").removesuffix("]"))


def is_network(text: str) -> bool:
    """Return whether a text is an IP address or network."""
    return _is(ip_network, text)


def is_loopback(name: str) -> bool:
    """Return whether a name or an address is a loopback one."""
    return name == "localhost" or (_is(ip_address, name) and ip_address(name).is_loopback)


def _is(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    """Normalize a name: lower case, without brackets and trailing dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
