"""A hub of models that keeps state and speaks as much of the Hugging Face Hub as fetching files of one commit needs."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tests.fakes.object_store import ObjectStore, StoreHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ObjectStore):
    """What it holds, how it misbehaves, and what it was asked."""

    overloaded_for: int = 0
    """So many requests it answers with 503."""

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store a file of a repository (OWNER/NAME); return its address."""
        self.objects[f"/{bucket}/resolve/main/{quote(key)}"] = content
        return f"hf://{bucket}/{key}"


@contextmanager
def hub() -> Iterator[Hub]:
    """Run a hub on a free port."""
    with serving(Hub(), _HubHandler) as running:
        yield running


class _HubHandler(StoreHandler):
    state: Hub

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        if self.state.overloaded_for:
            self.state.overloaded_for -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.state.objects.get(path.replace(f"/resolve/{COMMIT}/", "/resolve/main/"))
        self.send_response(404 if content is None else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.send(content)
