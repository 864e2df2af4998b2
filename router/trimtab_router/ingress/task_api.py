"""Shell: the administrative calls about tasks. Who changes one shows a key; what is kept, `task_book` knows."""

import asyncio
import hmac
import time
from pathlib import Path

from aiohttp import web

from trimtab_pipelines.router_state import TASKS_PATH
from trimtab_pipelines.tasks import MOST_BYTES
from trimtab_router.envoy.api_keys import digest_of
from trimtab_router.envoy.key_watcher import read_keys
from trimtab_router.ingress.http_responses import json_response
from trimtab_router.ingress.task_store import RegisteredTask, TaskRefused, TaskStore
from trimtab_router.router import Router

BODY_SECONDS = 15.0
_NO_BOOK = (
    "this router keeps no tasks, since what it keeps would end with its pod: add a line to the pipeline's resource "
    "(spec.stages[].variants[].tasks: name and storageUri), and every replica loads it; to delete a task write gone: "
    "true in place of its storageUri"
)


class TaskApi:
    """Answers who lists tasks, registers one or deletes one.

    Args:
        router: whose tasks they are.
        book: keeps them; None where there is no place for them.
        keys: the file of those who may; None lets nobody in.
    """

    def __init__(self, router: Router, book: TaskStore | None = None, keys: Path | None = None) -> None:
        self._router = router
        self._book = book
        self._keys = keys

    async def listed(self, _: web.BaseRequest) -> web.Response:
        """The tasks that were registered, by stage, variant and name."""
        found: dict[str, dict[str, object]] = {}
        for (stage, variant), tasks in (self._book.tasks if self._book else {}).items():
            told = {name: _told(task) for name, task in tasks.items()}
            found.setdefault(stage, {})[variant] = told
        return json_response(found)

    async def changed(self, request: web.BaseRequest) -> tuple[web.Response, str]:
        """Register or delete a task: PUT …/STAGE/VARIANT/NAME with its file as the body, or DELETE; and whose key.

        Where there is no book nobody has a key to show: all are told where to write tasks instead.
        """
        if self._book is None:
            return json_response({"error": _NO_BOOK}, 501), ""
        client = self._client_of(request)
        if client is None:
            error = "show a key of those who may register tasks: Authorization: Bearer KEY (--admin-keys names them)"
            return json_response({"error": error}, 401, {"WWW-Authenticate": "Bearer"}), ""
        return await self._changed(request, self._book), client

    async def _changed(self, request: web.BaseRequest, book: TaskStore) -> web.Response:
        parts = request.path.removeprefix(f"{TASKS_PATH}/").split("/")
        if request.method not in {"PUT", "DELETE"}:
            return json_response({"error": "a task is registered by PUT, and deleted by DELETE"}, 405)
        if len(parts) != 3:
            return json_response({"error": f"{request.method} {TASKS_PATH}/STAGE/VARIANT/NAME"}, 404)
        stage, variant, name = parts
        began = time.monotonic()
        try:
            if request.method == "DELETE":
                task, done = await book.delete(stage, variant, name), 200
            else:
                task, done = await book.register(stage, variant, name, await _body(request)), 201
        except TaskRefused as refused:
            return json_response({"error": str(refused)}, refused.status)
        told = {"task": name, **_told(task), "seconds": round(time.monotonic() - began, 4)}
        return json_response(told, done if task.replicas and not task.waiting else 202)

    def _client_of(self, request: web.BaseRequest) -> str | None:
        """Whose key a request shows; None where it is nobody's. The file is read each time: who is gone is out."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if self._keys is None or scheme.lower() != "bearer" or not key:
            return None
        shown = digest_of(key.strip())
        known = [one for one in read_keys(self._keys).keys if hmac.compare_digest(one.digest, shown)]
        return next((one.client for one in known if one.may_call(self._router.pipeline.name)), None)


async def _body(request: web.BaseRequest) -> bytes:
    """The body, as far as a task's file may be large."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                found += chunk
                if len(found) > MOST_BYTES:
                    raise TaskRefused(413, f"a task's file has at most {MOST_BYTES // 2**20} MiB")
    except TimeoutError as error:
        raise TaskRefused(408, f"the file did not come within {BODY_SECONDS:g} s") from error
    return bytes(found)


def _told(task: RegisteredTask) -> dict[str, object]:
    told = {"number": task.number, "replicas": task.replicas, "waiting": task.waiting}
    return told | task.card.model_dump(mode="json", include={"utility", "latency_seconds", "accuracy_by_point"})
