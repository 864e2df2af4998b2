"""One keep-alive HTTP/1.1 connection of the generator: one request under way at a time."""

import select

from benchmarks.overload.board import CUT, Board
from benchmarks.overload.sockets import connecting

HEAD_END = b"\r\n\r\n"
CHUNKS_END = b"0\r\n\r\n"
LENGTH = b"content-length:"


class Http1Connection:
    """Sends the same request again and again; opens itself anew where the other side has closed.

    Args:
        port: where to, on this machine.
        wire: the request as it goes over the wire.
        board: told of every answer.
        poll: in which the connection keeps itself registered.
    """

    def __init__(self, port: int, wire: bytes, board: Board, poll: "select.epoll") -> None:
        self._port, self._wire, self._board, self._poll = port, wire, board, poll
        self._index: int | None = None
        self._connected = False
        self._unsent = b""
        self._received = b""
        self.listed = False
        """Whether the generator has it among those with room."""
        self._open()

    def fileno(self) -> int:
        """The socket's number, as epoll knows it."""
        return self._socket.fileno()

    @property
    def has_room(self) -> bool:
        """Whether a request can be sent now."""
        return self._connected and self._index is None

    def send(self, index: int, now: float) -> None:
        """Send a request."""
        self._index = index
        self._board.begin(index, now)
        self._write(self._wire, now)

    def flush(self, now: float) -> None:
        """Nothing is kept back."""

    def on_event(self, mask: int, now: float) -> None:
        """Read and write what can be."""
        if mask & select.EPOLLOUT:
            self._connected = True
            unsent, self._unsent = self._unsent, b""
            self._poll.modify(self.fileno(), select.EPOLLIN)
            if unsent:
                self._write(unsent, now)
        if mask & ~select.EPOLLOUT:
            self._read(now)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _open(self) -> None:
        self._socket = connecting(self._port)
        self._connected = False
        self._poll.register(self.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _reopen(self, now: float) -> None:
        self._socket.close()
        if self._index is not None:
            self._end(CUT, now)
        self._received = self._unsent = b""
        self._open()

    def _write(self, data: bytes, now: float) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._reopen(now)
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._poll.modify(self.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _read(self, now: float) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._reopen(now)
            return
        received = self._received + data if self._received else data
        head_end = received.find(HEAD_END)
        if head_end < 0:
            self._received = received
            return
        head = received[:head_end].lower()
        if not _is_whole(received, head, head_end + len(HEAD_END)):
            self._received = received
            return
        self._received = b""
        if self._index is not None:
            self._end(int(head[9:12]), now)
        if self._unsent or b"connection: close" in head:
            self._reopen(now)

    def _end(self, code: int, now: float) -> None:
        index, self._index = self._index, None
        if index is not None:
            self._board.end(index, code, now)


def _is_whole(received: bytes, head: bytes, begin: int) -> bool:
    at = head.find(LENGTH)
    if at < 0:
        return received.endswith(CHUNKS_END)
    line_end = head.find(b"\r\n", at)
    length = head[at + len(LENGTH) : line_end if line_end >= 0 else None]
    return len(received) - begin >= int(length)
