"""The one line of JSON with which a router or a replica says that it listens, and where."""

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Where a router listens; behind a door it has no port for callers, which is 0."""

    rest_port: int
    admin_port: int


@dataclass(frozen=True, slots=True)
class ReplicaPorts:
    """Where a replica listens."""

    data_port: int
    http_port: int
    grpc_port: int


Ports = RouterPorts | ReplicaPorts


def print_ready_line(ports: Ports) -> None:
    """Say it on standard output; whoever started this process waits for that."""
    sys.stdout.write(json.dumps(asdict(ports)) + "\n")
    sys.stdout.flush()
