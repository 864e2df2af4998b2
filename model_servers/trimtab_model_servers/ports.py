"""Ports nobody else has, reserved until the servers that need them listen."""

import socket
from types import TracebackType
from typing import Self


class ReservedPort:
    """A free port, or one of a given number, held from the moment it is known until its server has bound it too.

    MLServer takes port numbers, not sockets, and keeps to itself which port 0 became. A socket bound without options
    gets a port of its own; marked for reuse afterwards and never listening, it lets a server bind the same port.
    """

    def __init__(self, address: str, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        if number:  # connections of the process before may still be fading
            self._share()
        self._socket.bind((address, number))
        self._share()
        self.number: int = self._socket.getsockname()[1]

    def _share(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
