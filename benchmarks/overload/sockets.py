"""A socket on its way to a port of this machine, for those who do not wait for it."""

import socket
from contextlib import suppress


def connecting(port: int) -> socket.socket:
    """Begin to connect; once the socket can be written to, it is connected, or it failed."""
    begun = socket.socket()
    begun.setblocking(False)
    begun.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(BlockingIOError):
        begun.connect(("127.0.0.1", port))
    return begun
