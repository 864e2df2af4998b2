"""Kubernetes timestamps: RFC 3339 in UTC."""

from datetime import UTC, datetime


def rfc3339(seconds: float) -> str:
    """Format Unix seconds as a Time, with whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(seconds: float) -> str:
    """Format Unix seconds as a MicroTime, as used in Leases."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(written: str) -> float:
    """Parse a timestamp into Unix seconds."""
    return datetime.fromisoformat(written).timestamp()
