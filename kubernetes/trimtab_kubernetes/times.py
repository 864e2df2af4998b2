"""Times as Kubernetes writes them: RFC 3339, in UTC. Pure."""

from datetime import UTC, datetime


def rfc3339(seconds: float) -> str:
    """Write Unix seconds as a Time: whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(seconds: float) -> str:
    """Write Unix seconds as a MicroTime, which Leases have."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(written: str) -> float:
    """Read a time as Unix seconds."""
    return datetime.fromisoformat(written).timestamp()
