"""`HostCheck`: host names under which a server on loopback may be called, against web pages of other sites.

A page in a browser may send requests to loopback, which name its own `Origin`. With a name that it lets resolve to
loopback (DNS rebinding) it could also read the responses; its requests then name that host.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
FORBIDDEN = (
    "on loopback only requests for 127.0.0.1, localhost, [::1] or a name of `hosts` (edge.yaml) are accepted, "
    "and none from web pages of other hosts"
)


class HostCheck:
    """Accepts every host by default."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = tuple(dict.fromkeys(hosts))
        names = "|".join(map(re.escape, self.hosts))
        self.origin_pattern = rf"https?://({names})(:\d+)?"
        self._origin = re.compile(self.origin_pattern)
        self._host = re.compile(rf"({names})(:\d+)?", re.IGNORECASE)

    @classmethod
    def at(cls, address: str, hosts: Sequence[str] = ()) -> "HostCheck":
        """Check of a server at an IP address: on loopback its names and `hosts` are accepted, elsewhere all."""
        return cls((*LOOPBACK_HOSTS, *hosts) if _is_loopback(address) else ())

    def accepts(self, headers: Mapping[str, str]) -> bool:
        if not self.hosts:
            return True
        origin = headers.get("Origin")
        own_host = self._host.fullmatch(headers.get("Host", "")) is not None
        return own_host and (origin is None or self._origin.fullmatch(origin) is not None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
