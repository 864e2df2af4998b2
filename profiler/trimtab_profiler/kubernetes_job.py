"""Profile Job: measures the variants of one task in this pod and writes ModelProfiles.

Profiles carry the task's fingerprint, which the operator and the adapter compare, and are owned by their pipeline.
"""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

from trimtab_kubernetes import Cluster, ClusterError, Rejected
from trimtab_kubernetes.errors import Backoff
from trimtab_kubernetes.objects import Object, owner_reference
from trimtab_pipelines.kubernetes_names import MANAGED_BY, PIPELINE_LABEL, PROFILER_MANAGER, profile_name
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, ProfileTask, profile_tasks
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.engine_replica import with_container_endpoints
from trimtab_profiler.identity import usable_cores
from trimtab_profiler.profile import ProfileOptions, Progress, profile

log = logging.getLogger(__name__)

WRITE_ATTEMPTS = 30
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0


class TaskError(Exception):
    """Task that cannot run."""


async def run_task(
    cluster: Cluster, pipeline: InferencePipeline, folder: Path, task_name: str, options: ProfileOptions | None = None
) -> dict[str, ModelProfile]:
    """Measure a task of a pipeline, quickly unless `options` are given, and write its profiles.

    Relative storage URIs start at `folder`. Raises TaskError if there is no such task or pipeline, ProfileError if a
    variant cannot be loaded or refuses a batch, ClusterError if the profiles cannot be written.
    """
    task = find_task(pipeline, task_name)
    only = task.variants_by_stage
    owner = await _retry(lambda: cluster.get("InferencePipeline", pipeline.metadata.namespace, pipeline.name))
    if owner is None:
        raise TaskError(f"InferencePipeline {pipeline.metadata.namespace}/{pipeline.name} does not exist")
    started = time.monotonic()
    names = "; ".join(f"{stage}: {', '.join(variants)}" for stage, variants in only.items())
    log.info("measuring %s on %d cores, load %.1f", names, usable_cores(), os.getloadavg()[0])
    local = "http://127.0.0.1:{port}"
    measured = with_container_endpoints(pipeline, local) if task.container else pipeline
    profiles = await profile(measured, folder, options or ProfileOptions.quick(pipeline, only), _log_progress)
    for stage, stage_profile in profiles.items():
        body = profile_body(stage_profile, pipeline, task, owner)
        await _retry(lambda body=body: cluster.apply(body, manager=PROFILER_MANAGER))
        points, name = len(stage_profile.spec.points), body["metadata"]["name"]
        log.info("%s: %d points written to ModelProfile %s", stage, points, name)
    log.info("done in %.0f s", time.monotonic() - started)
    return profiles


def find_task(pipeline: InferencePipeline, name: str) -> ProfileTask:
    """A task by name; TaskError if there is none."""
    tasks = {task.name: task for task in profile_tasks(pipeline)}
    if name not in tasks:
        known = ", ".join(tasks) or "none"
        raise TaskError(f"pipeline {pipeline.name} has no profile task {name!r}; its tasks: {known}")
    return tasks[name]


def profile_body(profile: ModelProfile, pipeline: InferencePipeline, task: ProfileTask, owner: Object) -> Object:
    """ModelProfile object, named by stage and kind of node, owned by its pipeline."""
    body: Object = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["metadata"] = {
        "name": profile_name(pipeline.name, profile.spec.stage, task.name),
        "namespace": pipeline.metadata.namespace,
        "labels": {PIPELINE_LABEL: pipeline.name, MANAGED_BY: PROFILER_MANAGER},
        "annotations": {FINGERPRINT_ANNOTATION: task.fingerprint},
        "ownerReferences": [owner_reference(owner)],
    }
    return body


def _log_progress(progress: Progress) -> None:
    measured = progress.measurement
    what = f"{progress.stage} {progress.variant} {progress.operating_point}: batch {measured.batch_size}"
    speed = f"{1000 * measured.latency_seconds_p50:.1f} ms, {measured.throughput_rps:.0f} rows/s"
    log.info("%d/%d %s in %s", progress.done, progress.total, what, speed)


async def _retry(request: Any) -> Any:
    """Retry a request while the API server is unavailable, so that a restart loses no measurements."""
    pauses = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
    for _ in range(WRITE_ATTEMPTS - 1):
        try:
            return await request()
        except Rejected:
            raise
        except ClusterError as error:
            pause_seconds = pauses.next_seconds(error)
            log.warning("%s; retrying in %.1f s", error, pause_seconds)
            await asyncio.sleep(pause_seconds)
    return await request()
