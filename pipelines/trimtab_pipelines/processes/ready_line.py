"""Ready line: one line of JSON with the ports of a router or a replica that has started."""

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Ports of a router; `rest_port` is 0 behind a proxy."""

    rest_port: int
    admin_port: int


@dataclass(frozen=True, slots=True)
class ReplicaPorts:
    """Ports of a replica."""

    data_port: int
    http_port: int
    grpc_port: int


Ports = RouterPorts | ReplicaPorts


def print_ready_line(ports: Ports) -> None:
    """Print the ready line on standard output, which the parent process waits for."""
    sys.stdout.write(json.dumps(asdict(ports)) + "\n")
    sys.stdout.flush()
