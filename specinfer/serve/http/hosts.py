"""Hosts: the names that a server is asked for by.

A page elsewhere may point its own name at this machine once it is loaded. Browsers then take this server for
the page's own, and let it read everything; but they still say in the header Host whom they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final

ANY: Final = "*"  # among the allowed names: the server may be asked for by whichever
_NAME: Final = re.compile(r"[0-9a-z._-]+", re.IGNORECASE)
_HOST: Final = re.compile(rf"({_NAME.pattern}|\[[0-9a-f:.]+\])(:[0-9]*)?", re.IGNORECASE)  # a port perhaps


class Hosts:
    """The names and addresses that a server is asked for by, beside this machine's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_plain, names))

    @classmethod
    def of(cls, bound: str, allowed: Sequence[str], *, keyed: bool, address: str) -> Hosts | None:
        """The names of a server bound to `bound`, which is `address`; None where it may be asked for by any.

        A page elsewhere does not know a key, so with keys names are looked at only where some are allowed. It
        is the same where other machines ask: what they call this one cannot be told from here.
        """
        if ANY in allowed or not (allowed or (not keyed and is_loopback(address))):
            return None
        return cls((bound, *allowed))

    def admit(self, header: bytes) -> bool:
        """Whether the value of a header Host is one of the names, or this machine's own, with any port."""
        found = _HOST.fullmatch(header.decode("latin-1"))
        if found is None:
            return False
        name = _plain(found[1])
        return name in self._names or is_loopback(name)


def is_origin_of(origin: str, header: str) -> bool:
    """Whether a header Origin names the very server that was asked for, which is in the header Host.

    A proxy with TLS may leave the port out of Host, where Origin has none either.
    """
    scheme, found, rest = origin.partition("://")
    own, asked = _HOST.fullmatch(rest), _HOST.fullmatch(header)
    if not found or own is None or asked is None or _plain(own[1]) != _plain(asked[1]):
        return False
    ports = [one[2].removeprefix(":") if one[2] else "" for one in (own, asked)]
    usual = {"http": "80", "https": "443"}.get(scheme.lower(), "")
    return len({port or usual for port in ports}) == 1


def is_host(text: str) -> bool:
    """Whether a text is a name or an address, without a port or anything else."""
    return _NAME.fullmatch(text) is not None or _is(ip_address, text.removeprefix("[").removesuffix("]"))


def is_network(text: str) -> bool:
    """Whether a text is an address or a network of addresses."""
    return _is(ip_network, text)


def is_loopback(name: str) -> bool:
    """Whether a name or an address is one by which only a machine itself asks for itself."""
    return name == "localhost" or (_is(ip_address, name) and ip_address(name).is_loopback)


def _is(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _plain(name: str) -> str:
    """A name as its spellings are compared: without capitals, brackets and a dot at its end."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
