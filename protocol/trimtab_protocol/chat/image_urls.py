"""Which images may be fetched, and from where: nothing that is not listed, and nothing private by a is_public name. Pure.

A caller's address must not make the router reach what the caller cannot. So a host is compared as a whole, its address
is checked after it was looked up (and is the one connected to), and nothing is followed that leads elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from posixpath import normpath
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from trimtab_pipelines.chat_settings import SCHEME_PORTS, ImageLimits
from trimtab_protocol.chat.errors import InvalidChat

MAX_URL_CHARACTERS: Final = 4096
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
"""Addresses in which another one is wrapped that a gateway unwraps."""


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """An address that may be fetched; `own`: it is our own store's, wherever that is."""

    url: str
    trusted: bool


def parse_target(address: str, field: str, bounds: ImageLimits) -> UrlTarget:
    """The target of a caller's address; raises InvalidChat where it may not be fetched."""
    parts = _split(address)
    if parts is None:
        raise _refused(field, "is neither a data URL nor an http or https address")
    if any(_within(parts, store) for store in bounds.trusted_prefixes):
        return UrlTarget(address, trusted=True)
    if parts.hostname not in bounds.allowed_domains or _is_address(parts.hostname):
        raise _refused(field, "may not be fetched from there; send it as a data URL")
    if parts.port not in {None, SCHEME_PORTS[parts.scheme]}:
        raise _refused(field, f"may only be fetched from the port of {parts.scheme}")
    return UrlTarget(address, trusted=False)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, so that whoever sent it could reach it himself."""
    found: IPv4Address | IPv6Address | None = ip_address(address)
    if isinstance(found, IPv6Address):
        if found.sixtofour is not None or found.teredo is not None or any(found in net for net in _TRANSLATED):
            return False
        found = found.ipv4_mapped or found
    return found is not None and found.is_global and not found.is_multicast and not found.is_reserved


def _is_address(host: str) -> bool:
    """Whether a host is an IP address itself, which nobody looks up, so that nobody would check it."""
    try:
        ip_address(host)
    except ValueError:
        return host.replace(".", "").isdigit()
    return True


def _split(address: str) -> SplitResult | None:
    if len(address) > MAX_URL_CHARACTERS or not address.isascii() or not address.isprintable() or "\\" in address:
        return None
    try:
        parts = urlsplit(address)
        usable = parts.scheme in SCHEME_PORTS and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return None
    return parts if usable and not any(c.isspace() for c in address) else None


def _within(parts: SplitResult, store: str) -> bool:
    own = urlsplit(store)
    path, prefix = normpath(unquote(parts.path)), own.path.rstrip("/") + "/"
    here = (parts.scheme, parts.hostname, parts.port or SCHEME_PORTS[parts.scheme])
    there = (own.scheme, own.hostname, own.port or SCHEME_PORTS[own.scheme])
    return here == there and path.startswith(prefix) and parts.path.startswith(prefix)


def _refused(field: str, why: str) -> InvalidChat:
    return InvalidChat(f"{field} {why}", param=field, code="invalid_image_url")


def first_private(addresses: Sequence[str]) -> str | None:
    """The first address of a host that is none of the internet's; None where all are."""
    return next((address for address in addresses if not is_public(address)), None)
