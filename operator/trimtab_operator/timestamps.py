"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def seconds_of(written: str) -> float:
    """Return Unix seconds for an RFC 3339 time."""
    return datetime.fromisoformat(written).timestamp()


def written(seconds: float) -> str:
    """Return the RFC 3339 time, in whole seconds, as Kubernetes does."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
