"""A hub of models that keeps state and speaks as much of the Hugging Face Hub as fetching files of one commit needs."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tests.fakes.object_store import ObjectStore, StoreHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The commit that the branch main is at; other revisions are put by name."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Hub(ObjectStore):
    """What it holds, how it misbehaves, and what it was asked."""

    overloaded_for: int = 0
    """So many requests it answers with 503."""

    def put(self, bucket: str, key: str, content: bytes, revision: str = "main") -> str:
        """Store a file of a repository (OWNER/NAME) in one of its revisions; return its address in the newest."""
        self.objects[f"/{bucket}/resolve/{revision}/{quote(key)}"] = content
        return f"hf://{bucket}/{key}"


@contextmanager
def hub() -> Iterator[Hub]:
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
        revision = path.partition("/resolve/")[2].partition("/")[0]
        self.send_header("X-Repo-Commit", revision if _COMMIT.fullmatch(revision) else COMMIT)
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
