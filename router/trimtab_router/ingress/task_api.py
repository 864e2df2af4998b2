"""`TaskApi`: administrative calls that list, register and delete tasks. Changes require an admin key."""

import asyncio
import hmac
import time
from pathlib import Path

from aiohttp import web

from trimtab_pipelines.router_state import TASKS_PATH
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES
from trimtab_router.envoy.api_keys import key_digest
from trimtab_router.envoy.key_watcher import read_keys
from trimtab_router.ingress.base import json_response
from trimtab_router.ingress.task_store import RegisteredTask, TaskRefused, TaskStore, as_reported
from trimtab_router.router import Router

BODY_SECONDS = 15.0
_NO_STORE = "this router has no place for tasks: start it with --tasks FOLDER, or in a cluster"


class TaskApi:
    """Lists, registers and deletes tasks. `store` is None without a folder for them."""

    def __init__(self, router: Router, store: TaskStore | None = None, keys: Path | None = None) -> None:
        self._router = router
        self._store = store
        self._keys = keys

    async def list_tasks(self, _: web.BaseRequest) -> web.Response:
        tasks_by_stage: dict[str, dict[str, object]] = {}
        for (stage, variant), tasks in (dict(self._store.tasks) if self._store else {}).items():
            metadata = (await self._router.model_metadata(stage, variant)).values()
            result = {name: _task_json(as_reported(name, task, metadata)) for name, task in tasks.items()}
            tasks_by_stage.setdefault(stage, {})[variant] = result
        return json_response(tasks_by_stage)

    async def change_task(self, request: web.BaseRequest) -> tuple[web.Response, str]:
        """Register a task (PUT …/STAGE/VARIANT/NAME with its file as body) or delete it. Also returns the client."""
        if self._store is None:
            return json_response({"error": _NO_STORE}, 501), ""
        client = self._authenticate(request)
        if client is None:
            error = "an admin key is required: Authorization: Bearer KEY (from the file --admin-keys)"
            return json_response({"error": error}, 401, {"WWW-Authenticate": "Bearer"}), ""
        return await self._changed(request, self._store), client

    async def _changed(self, request: web.BaseRequest, store: TaskStore) -> web.Response:
        parts = request.path.removeprefix(f"{TASKS_PATH}/").split("/")
        if request.method not in {"PUT", "DELETE"}:
            return json_response({"error": "a task is registered by PUT, and deleted by DELETE"}, 405)
        if len(parts) != 3:
            return json_response({"error": f"{request.method} {TASKS_PATH}/STAGE/VARIANT/NAME"}, 404)
        stage, variant, name = parts
        started_at = time.monotonic()
        try:
            if request.method == "DELETE":
                task, status = await store.delete(stage, variant, name), 200
            else:
                task, status = await store.register(stage, variant, name, await _body(request)), 201
        except TaskRefused as error:
            return json_response({"error": str(error)}, error.status)
        result = {"task": name, **_task_json(task), "seconds": round(time.monotonic() - started_at, 4)}
        return json_response(result, status if task.replicas and not task.waiting else 202)

    def _authenticate(self, request: web.BaseRequest) -> str | None:
        """Client of a request's key, None if the key is unknown. The key file is read for each request."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if self._keys is None or scheme.lower() != "bearer" or not key:
            return None
        digest = key_digest(key.strip())
        matching = [key for key in read_keys(self._keys).keys if hmac.compare_digest(key.digest, digest)]
        return next((key.client for key in matching if key.may_call(self._router.pipeline.name)), None)


async def _body(request: web.BaseRequest) -> bytes:
    tasks_by_stage = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                tasks_by_stage += chunk
                if len(tasks_by_stage) > MAX_TASK_FILE_BYTES:
                    raise TaskRefused(413, f"a task's file has at most {MAX_TASK_FILE_BYTES // 2**20} MiB")
    except TimeoutError as error:
        raise TaskRefused(408, f"the file did not arrive within {BODY_SECONDS:g} s") from error
    return bytes(tasks_by_stage)


def _task_json(task: RegisteredTask) -> dict[str, object]:
    result: dict[str, object] = {"number": task.index, "replicas": task.replicas, "waiting": task.waiting}
    if task.rejection:
        result["rejected"] = task.rejection
    return result | task.record.model_dump(mode="json", include={"utility", "latency_seconds", "accuracy_by_point"})
