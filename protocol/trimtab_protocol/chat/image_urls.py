"""Image URLs that may be fetched: only allowed hosts, and no private addresses of public names.

A client's URL must not make the router reach what the client cannot. Hosts are compared as a whole, the resolved
address is checked and used for the connection, and redirects are not followed.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from posixpath import normpath
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from trimtab_pipelines.chat_settings import SCHEME_PORTS, ImageLimits
from trimtab_protocol.errors import InvalidChat

MAX_URL_CHARACTERS: Final = 4096
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
"""NAT64 prefixes, which embed an IPv4 address."""


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """A URL that may be fetched; `trusted` if it has a trusted prefix."""

    url: str
    trusted: bool


def parse_target(address: str, field: str, bounds: ImageLimits) -> UrlTarget:
    """Check a client's URL; InvalidChat if it may not be fetched."""
    parts = _split(address)
    if parts is None:
        raise _refused(field, "is neither a data URL nor an http or https URL")
    if any(_within(parts, store) for store in bounds.trusted_prefixes):
        return UrlTarget(address, trusted=True)
    if parts.hostname not in bounds.allowed_domains or _is_address(parts.hostname):
        raise _refused(field, "may not be fetched from there; send it as a data URL")
    if parts.port not in {None, SCHEME_PORTS[parts.scheme]}:
        raise _refused(field, f"may only be fetched from the port of {parts.scheme}")
    return UrlTarget(address, trusted=False)


def is_public(address: str) -> bool:
    ip: IPv4Address | IPv6Address | None = ip_address(address)
    if isinstance(ip, IPv6Address):
        if ip.sixtofour is not None or ip.teredo is not None or any(ip in net for net in _TRANSLATED):
            return False
        ip = ip.ipv4_mapped or ip
    return ip is not None and ip.is_global and not ip.is_multicast and not ip.is_reserved


def _is_address(host: str) -> bool:
    """Whether a host is an IP address, which is not resolved and therefore not checked."""
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
    origin = (parts.scheme, parts.hostname, parts.port or SCHEME_PORTS[parts.scheme])
    trusted = (own.scheme, own.hostname, own.port or SCHEME_PORTS[own.scheme])
    return origin == trusted and path.startswith(prefix) and parts.path.startswith(prefix)


def _refused(field: str, why: str) -> InvalidChat:
    return InvalidChat(f"{field} {why}", param=field, code="invalid_image_url")
