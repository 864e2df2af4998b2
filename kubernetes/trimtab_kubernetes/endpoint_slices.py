"""What stands behind a Service, as its EndpointSlices tell it: where each pod is, and whether it serves. Pure.

Whoever reads slices chooses by these three conditions; what a slice leaves out is filled in as the API says.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Backend:
    """One endpoint of a slice.

    Attributes:
        name: of its pod; its address where no pod is named.
        host: its address, as it stands before a port: that of IPv6 in brackets.
        ready: it takes new requests; untold it does. One that is about to end is not ready, whatever it could do.
        serving: it could take them, also where it is about to end; untold as far as it is ready.
        terminating: it is about to end.
    """

    name: str
    host: str
    ready: bool
    serving: bool
    terminating: bool


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """One slice.

    Attributes:
        ports: by name, in the order told; those without a number are left out.
    """

    name: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    backends: tuple[Backend, ...]


def parse_endpoint_slice(found: Mapping[str, Any]) -> EndpointSlice:
    """Read an EndpointSlice as the API server has it."""
    metadata, ports = found["metadata"], found.get("ports") or ()
    return EndpointSlice(
        name=str(metadata["name"]),
        labels=metadata.get("labels") or {},
        ports={str(port.get("name") or ""): int(port["port"]) for port in ports if port.get("port")},
        backends=tuple(_backend(entry) for entry in found.get("endpoints") or () if entry.get("addresses")),
    )


def _backend(entry: Mapping[str, Any]) -> Backend:
    address, told = str(entry["addresses"][0]), entry.get("conditions") or {}
    ready = told.get("ready") is not False
    return Backend(
        name=(entry.get("targetRef") or {}).get("name") or address,
        host=_bracketed(address),
        ready=ready,
        serving=ready if told.get("serving") is None else bool(told["serving"]),
        terminating=bool(told.get("terminating")),
    )


def _bracketed(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address  # a name, of a slice of addressType FQDN
