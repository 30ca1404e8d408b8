"""Addresses of machines."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address, or the name ``localhost``, is this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
