"""`ReservedPort`: a port reserved until its server listens."""

import socket
from types import TracebackType
from typing import Self


class ReservedPort:
    """A free or given port, reserved until a server has bound it too.

    MLServer accepts port numbers, not sockets, and does not report which port it got for 0. A socket bound without
    options gets an exclusive port; with reuse enabled afterwards, and never listening, it lets a server bind that port.
    """

    def __init__(self, address: str, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        if number:  # connections of the previous process may linger
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
