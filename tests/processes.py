"""Server processes that tests run, and ports reserved for them against other processes."""

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 20.0


@contextmanager
def held_port(host: str = LOOPBACK) -> Iterator[int]:
    """Hold a port without listening.

    Who connects to it is refused until a server binds it too; it may, as every server does that sets SO_REUSEADDR:
    asyncio's, gRPC's and those written in Go. The system gives a held port to no connection of its own.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield int(held.getsockname()[1])


def own_address() -> str:
    """An address of this machine that an EndpointSlice may name: not loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no address but loopback's: {error}")
        return str(probe.getsockname()[0])


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a program that writes to a log; stop it at the end, whether it likes to or not."""
    with log.open("wb") as into:
        process = subprocess.Popen(command, stdout=into, stderr=into, cwd=folder, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
