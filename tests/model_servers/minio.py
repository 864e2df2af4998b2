"""A real MinIO on loopback, and a TCP proxy that slows or breaks connections."""

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from minio import Minio

from tests.control_plane import tool
from tests.ports import held_port
from tests.processes import running

ACCESS_KEY, SECRET_KEY = "reader", "a-confidential-key"
START_SECONDS = 30.0


@dataclass
class ObjectStore:
    """A running MinIO."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> Minio:
        return Minio(f"127.0.0.1:{self.port}", access_key=ACCESS_KEY, secret_key=SECRET_KEY, secure=False)

    def put(self, bucket: str, key: str, file: Path) -> str:
        """Store a file; return its address."""
        if not self.client.bucket_exists(bucket):
            self.client.make_bucket(bucket)
        self.client.fput_object(bucket, key, str(file))
        return f"s3://{bucket}/{key}"


@contextmanager
def minio(folder: Path) -> Iterator[ObjectStore]:
    """Run MinIO over an empty folder."""
    environment = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY, "MINIO_BROWSER": "off"}
    with held_port() as port, held_port() as console:
        addresses = ("--address", f"127.0.0.1:{port}", "--console-address", f"127.0.0.1:{console}")
        command = [tool("minio"), "server", "--quiet", *addresses, str(folder / "data")]
        with running(command, folder / "log", environment=os.environ | environment | {"HOME": str(folder)}) as process:
            _wait(port, process, folder / "log")
            yield ObjectStore(port)


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/minio/health/ready").close()
            return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"MinIO did not come up: {log.read_text()[-2000:]}")
        time.sleep(0.05)


@dataclass
class Proxy:
    """Relays connections to a port; what comes back may be slowed, or cut after so many bytes of a connection."""

    to: int
    bytes_per_second: float = float("inf")
    cut_after_bytes: list[int] = field(default_factory=list)
    """For each connection from the first one on; those after it are whole."""
    connections: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Take no more connections and end those there are."""
        self._closing.set()
        for each in (self._listener, *self._sockets):
            _end(each)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            cut = self.cut_after_bytes[self.connections] if self.connections < len(self.cut_after_bytes) else 2**62
            self.connections += 1
            theirs = socket.create_connection(("127.0.0.1", self.to))
            self._sockets += [ours, theirs]
            for thread in (
                threading.Thread(target=self._upstream, args=(ours, theirs), daemon=True),
                threading.Thread(target=self._downstream, args=(theirs, ours, cut), daemon=True),
            ):
                thread.start()
                self._threads.append(thread)

    def _upstream(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)
        _end(to)

    def _downstream(self, source: socket.socket, to: socket.socket, cut: int) -> None:
        sent = 0
        with suppress(OSError):
            while sent < cut and not self._closing.is_set():
                size = int(min(65536, self.bytes_per_second * 0.02 + 1)) if self.bytes_per_second < 1e12 else 65536
                data = source.recv(size)
                if not data:
                    break
                to.sendall(data[: cut - sent])
                sent += len(data)
                self._closing.wait(len(data) / self.bytes_per_second)
        _end(to)
        _end(source)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
