"""`TaskConfigMaps`: files of the tasks registered at run time in a cluster, in one ConfigMap for each variant.

The operator creates the ConfigMaps, and the kubelet mounts them in the replicas. Every router of the pipeline watches
them, and changes the version that it knows.
"""

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable

from trimtab_kubernetes import Cluster, ClusterError, Conflict, kind_of, list_and_watch
from trimtab_kubernetes.objects import Object, version_of
from trimtab_pipelines.kubernetes_names import ROUTER_MANAGER, tasks_name
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.ingress.task_store import Changes, Files, TaskRefused

KIND = "ConfigMap"
MERGE = "application/merge-patch+json"
MAX_BYTES = 2**20
"""Of all values of a ConfigMap, which the API server enforces."""
Apply = Callable[[str, str, Files], Awaitable[None]]
"""Called with stage, variant and its files."""


class TaskConfigMaps:
    """Task files of a pipeline in a cluster."""

    def __init__(self, cluster: Cluster, pipeline: InferencePipeline) -> None:
        self._cluster, self._pipeline = cluster, pipeline
        self._latest: dict[str, Object] = {}
        """ConfigMaps by name."""

    async def read(self, stage: str, variant: str) -> Files:
        name = tasks_name(self._pipeline.name, stage, variant)
        try:
            found = await self._cluster.get(KIND, self._pipeline.metadata.namespace, name)
        except ClusterError as error:
            raise TaskRefused(503, f"registered tasks cannot be read: {error}") from error
        if found is None:
            raise TaskRefused(503, f"there is no ConfigMap {name} yet, which the operator creates; try again")
        return self._newest_files(found)

    async def write(self, stage: str, variant: str, files: Files, changes: Changes) -> Files | None:
        """As `TaskFiles.write`. Raises TaskRefused: 413 if a ConfigMap has no room, 503 if the API server refuses."""
        name = tasks_name(self._pipeline.name, stage, variant)
        path = kind_of(KIND).path(self._pipeline.metadata.namespace, name)
        found, manager = self._latest.get(name), {"fieldManager": ROUTER_MANAGER}
        if found is None or _files(found) != files:  # the watch has seen a newer version than the changes are of
            return None
        _require_room(files, changes)
        try:
            return self._newest_files(await self._cluster.call("PATCH", path, manager, _patch(found, changes), MERGE))
        except Conflict:
            return None
        except ClusterError as error:
            raise TaskRefused(503, f"the change cannot be stored: {error}") from error

    async def watch(self, apply: Apply) -> None:
        """Apply the files of each variant after every change, without end."""
        async with asyncio.TaskGroup() as watching:
            for stage in self._pipeline.spec.stages:
                for variant in stage.variants_with_tasks:
                    watching.create_task(self._watch(stage.name, variant.name, apply))

    async def _watch(self, stage: str, variant: str, apply: Apply) -> None:
        name = tasks_name(self._pipeline.name, stage, variant)
        async for change in list_and_watch(self._cluster, KIND, self._pipeline.metadata.namespace, name=name):
            if change.rewound:
                self._latest.pop(name, None)
            elif change.object is not None:
                found = {"metadata": change.object["metadata"]} if change.deleted else change.object
                await apply(stage, variant, self._newest_files(found))

    def _newest_files(self, found: Object) -> Files:
        """Files of the newest version of a ConfigMap: a watch may be faster than a response, or slower."""
        name = found["metadata"]["name"]
        if name not in self._latest or version_of(found) >= version_of(self._latest[name]):
            self._latest[name] = found
        return _files(self._latest[name])


def _files(found: Object) -> Files:
    return {name: b64decode(content or "") for name, content in found.get("binaryData", {}).items()}


def _patch(found: Object, changes: Changes) -> Object:
    """Merge patch of one version of a ConfigMap."""
    encoded = {name: None if content is None else b64encode(content).decode() for name, content in changes.items()}
    return {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "binaryData": encoded}


def _require_room(files: Files, changes: Changes) -> None:
    used, added = sum(map(len, files.values())), sum(len(content or b"") for content in changes.values())
    if added and used + added > MAX_BYTES:
        raise TaskRefused(
            413,
            f"in a cluster the registered tasks of a variant have at most {MAX_BYTES} bytes; {used} are used, and this "
            f"task has {added}: delete tasks, or add it to the pipeline (spec.stages[].variants[].tasks)",
        )
