"""`Cluster`: objects of the Kubernetes API as dictionaries, over the official client's transport and credentials.

Writes use server-side apply with a field manager, so that each field has one owner and applying the same object again
changes nothing.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from trimtab_kubernetes.connection import JSON, Connection, Request, read_json
from trimtab_kubernetes.errors import NotFound, Unreachable, error_for
from trimtab_kubernetes.kinds import Kind, kind_of
from trimtab_kubernetes.objects import Object

PAGE_OBJECTS = "200"  # of a list, some MiB: thousands take longer than the request timeout on a busy server
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
WATCH_SECONDS = 300  # the server ends a watch after this time, so that dead connections are detected
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects, and the resource version to watch them from."""

    items: list[Object]
    resource_version: str


class Cluster:
    """One API server. Use as an asynchronous context manager, or call `close`."""

    def __init__(self, connection: Connection, may_write: Callable[[], bool] = lambda: True) -> None:
        self._connection, self._may_write = connection, may_write

    def with_write_guard(self, may_write: Callable[[], bool]) -> "Cluster":
        """A client of the same connection whose writes raise Unreachable while `may_write` is false."""
        return Cluster(self._connection, may_write)

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> "Cluster":
        """Connect with the pod's service account or KUBECONFIG; ClusterError if neither exists."""
        connection = Connection(kubeconfig)
        await connection.open()
        return cls(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    async def get(self, kind: str | Kind, namespace: str | None, name: str) -> Object | None:
        try:
            return await self.call("GET", _kind(kind).path(namespace, name))
        except NotFound:
            return None

    async def list(
        self, kind: str | Kind, namespace: str | None = None, labels: str | None = None, name: str | None = None
    ) -> Listing:
        """All pages of a list at once."""
        items, version = list[Object](), ""
        async for page in self.pages(kind, namespace, labels, name):
            items += page.items
            version = page.resource_version
        return Listing(items, version)

    async def pages(
        self,
        kind: str | Kind,
        namespace: str | None = None,
        labels: str | None = None,
        name: str | None = None,
        *,
        accept: str = JSON,
    ) -> AsyncIterator[Listing]:
        """Yield the objects of a kind, of one namespace or all, with a label selector or a name, page by page.

        `accept`: JSON or METADATA. Each page is read within the request timeout. Raises Gone if the server forgets the
        list meanwhile.
        """
        known, token = _kind(kind), None
        query = {"labelSelector": labels, "fieldSelector": _named(name), "limit": PAGE_OBJECTS}
        identity = {"apiVersion": known.api_version, "kind": known.kind}
        while True:
            request = Request("GET", known.path(namespace), {**query, "continue": token}, accept=accept)
            page = await self._connection.call(request, self._may_write)
            yield Listing(
                [item | identity for item in page.get("items") or ()], page["metadata"].get("resourceVersion", "")
            )
            token = page["metadata"].get("continue")
            if not token:
                return

    async def apply(
        self,
        body: Mapping[str, Any],
        *,
        manager: str,
        subresource: str | None = None,
        force: bool = True,
        dry_run: bool = False,
    ) -> Object:
        """Apply an object server-side and return it as it is now; fields that the manager now leaves out are removed.

        `force` takes over fields that another manager owns; else Conflict is raised. Raises Rejected if the object is
        wrong or not allowed. Raises Unreachable if there is no answer; it may or may not have been applied, and
        applying it again is harmless.
        """
        kind, metadata = kind_of(body), body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true" if force else None, "dryRun": "All" if dry_run else None}
        return await self.call("PATCH", path, query, body, "application/apply-patch+yaml")

    async def create(self, body: Mapping[str, Any], *, manager: str) -> Object:
        """Create an object; Conflict if it exists."""
        path = kind_of(body).path(body["metadata"].get("namespace"))
        return await self.call("POST", path, {"fieldManager": manager}, body)

    async def replace(self, body: Mapping[str, Any], *, manager: str) -> Object:
        """Replace an object as it was read; Conflict if it has changed since."""
        metadata = body["metadata"]
        path = kind_of(body).path(metadata.get("namespace"), metadata["name"])
        return await self.call("PUT", path, {"fieldManager": manager}, body)

    async def delete(self, kind: str | Kind, namespace: str | None, name: str, *, uid: str | None = None) -> bool:
        """Delete an object, with the uid if given; False if there was none."""
        options: Object = {"propagationPolicy": "Background"} | ({"preconditions": {"uid": uid}} if uid else {})
        try:
            await self.call("DELETE", _kind(kind).path(namespace, name), None, options)
        except NotFound:
            return False
        return True

    async def watch(
        self,
        kind: str | Kind,
        namespace: str | None,
        labels: str | None,
        resource_version: str,
        name: str | None = None,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield (event type, object) from a resource version on, until the server ends the watch.

        Event types are ADDED, MODIFIED, DELETED and BOOKMARK, which carries a newer version. Raises Gone if the version
        is too old.
        """
        query = {
            "watch": "true",
            "labelSelector": labels,
            "fieldSelector": _named(name),
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        path = _kind(kind).path(namespace)
        response = await self._connection.send(Request("GET", path, query, timeout_seconds=WATCH_SECONDS + 30.0))
        try:
            while line := await response.content.readline():
                event = read_json(line)
                if event["type"] == "ERROR":
                    raise error_for(int(event["object"].get("code", 500)), str(event["object"].get("message", "")))
                yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unreachable(f"watch of {_kind(kind).plural} failed: {type(error).__name__} {error}") from error
        finally:
            response.close()

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | None] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
    ) -> Object:
        """Send one request, also to a subresource without a method of its own, and return the decoded response."""
        request = Request(method, path, query or {}, body, content_type)
        return await self._connection.call(request, self._may_write)


def own_namespace() -> str:
    """Namespace of this pod, else POD_NAMESPACE, else `default`."""
    if _NAMESPACE_FILE.exists():
        return _NAMESPACE_FILE.read_text().strip()
    return os.environ.get("POD_NAMESPACE", "default")


def _named(name: str | None) -> str | None:
    return f"metadata.name={name}" if name else None


def _kind(kind: str | Kind) -> Kind:
    return kind if isinstance(kind, Kind) else kind_of(kind)
