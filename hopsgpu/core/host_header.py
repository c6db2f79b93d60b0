"""Which Host headers name a server: protection from DNS rebinding.

The owner of a web page can resolve its name to this machine. The browser then sends the page's
requests here, as those of the page's own server, with the page's name in this header.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def host_of(netloc: str) -> str:
    """Return the host of "host:port", without the brackets of an IPv6 address; "" for none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def is_host_of_server(header: str, names: Iterable[str]) -> bool:
    """Return whether a Host header has an address, a name of the loopback, or one of `names`.

    An address is no name that somebody could resolve to this machine.
    """
    host = host_of(header)
    if host in _LOOPBACK or host in {name.lower() for name in names}:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
