"""`EndpointSlice`: the endpoints behind a Service, with their conditions.

Absent conditions have the defaults of the Kubernetes API.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Backend:
    """One endpoint of a slice."""

    name: str
    """Name of its pod, or its address."""
    host: str
    """Its address; IPv6 in brackets."""
    ready: bool
    """Whether it accepts new requests; true if absent, false while it terminates."""
    serving: bool
    """Whether it could serve requests, even while it terminates; equals `ready` if absent."""
    terminating: bool
    """Whether it terminates."""


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """One slice."""

    name: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    """Ports by name; ports without a number are omitted."""
    backends: tuple[Backend, ...]


def parse_endpoint_slice(document: Mapping[str, Any]) -> EndpointSlice:
    metadata, ports = document["metadata"], document.get("ports") or ()
    return EndpointSlice(
        name=str(metadata["name"]),
        labels=metadata.get("labels") or {},
        ports={str(port.get("name") or ""): int(port["port"]) for port in ports if port.get("port")},
        backends=tuple(_backend(entry) for entry in document.get("endpoints") or () if entry.get("addresses")),
    )


def _backend(entry: Mapping[str, Any]) -> Backend:
    address, conditions = str(entry["addresses"][0]), entry.get("conditions") or {}
    ready = conditions.get("ready") is not False
    return Backend(
        name=(entry.get("targetRef") or {}).get("name") or address,
        host=_bracketed(address),
        ready=ready,
        serving=ready if conditions.get("serving") is None else bool(conditions["serving"]),
        terminating=bool(conditions.get("terminating")),
    )


def _bracketed(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address  # addressType FQDN
