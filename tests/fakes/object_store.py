"""An object store that keeps state and speaks as much of S3 as reading needs; key ids are checked, signatures not."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message><Resource>{path}</Resource></Error>"


@dataclass
class ObjectStore:
    """What it holds, whom it knows, how it misbehaves, and what it was asked."""

    objects: dict[str, bytes] = field(default_factory=dict)
    access_keys: set[str] = field(default_factory=lambda: {"reader"})
    may_list: bool = True
    """Whether clients may list buckets; if not, the store does not report which objects are absent."""
    stall_after_bytes: int | None = None
    declare_bytes: int | None = None
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store an object; return its address."""
        self.objects[f"/{bucket}/{key}"] = content
        return f"s3://{bucket}/{key}"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    with serving(ObjectStore(), StoreHandler) as store:
        yield store


Store = TypeVar("Store", bound=ObjectStore)


@contextmanager
def serving(store: Store, handler: type["StoreHandler"]) -> Iterator[Store]:

    class Handler(handler):  # type: ignore[misc, valid-type]
        state = store

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class StoreHandler(BaseHTTPRequestHandler):
    """Answers as an object store does."""

    state: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def answer(self, *, with_body: bool) -> None:
        """Tell an object, and give its bytes where they are asked for."""
        state = self.state
        path = self.path.partition("?")[0]
        state.requests.append(f"{self.command} {path}")
        if not any(f"Credential={key}/" in self.headers.get("Authorization", "") for key in state.access_keys):
            return self._refuse(403, "AccessDenied", "Access Denied.", path)
        content = state.objects.get(path)
        if content is None and not state.may_list:
            return self._refuse(403, "AccessDenied", "Access Denied.", path)
        if content is None:
            bucket = path.split("/")[1]
            if not any(known.startswith(f"/{bucket}/") for known in state.objects):
                return self._refuse(404, "NoSuchBucket", "The specified bucket does not exist", path)
            return self._refuse(404, "NoSuchKey", "The specified key does not exist.", path)
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(state.declare_bytes or len(content)))
        self.end_headers()
        if with_body:
            self.send(content)
        return None

    def send(self, content: bytes) -> None:
        """Send bytes, or the first of them and then nothing."""
        stall = self.state.stall_after_bytes
        self.wfile.write(content[:stall])
        if stall is not None:
            self.wfile.flush()
            self.state.released.wait()
            self.close_connection = True

    def _refuse(self, status: int, code: str, message: str, path: str) -> None:
        body = ERROR.format(code=code, message=message, path=path).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
