"""A profile Job of a cluster: measures the variants of one task in this pod and writes what it found as ModelProfiles.

They carry the task's fingerprint, by which operator and adapter tell whether they still count, and go with their
pipeline. A container of the user's own cannot be started in here: its variants need a ModelProfile the user gives.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_kubernetes import Cluster, ClusterError, Rejected
from trimtab_kubernetes.backoff import Backoff
from trimtab_kubernetes.objects import Object, owner_reference
from trimtab_pipelines.kubernetes_names import MANAGED_BY, PIPELINE_LABEL, PROFILER_MANAGER, profile_name
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, ProfileTask, profile_tasks
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.hardware import usable_cores
from trimtab_profiler.profile import ProfileOptions, Progress, profile

log = logging.getLogger(__name__)

WRITE_ATTEMPTS = 30
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


class TaskError(Exception):
    """A task that cannot be carried out; the message says why and what to do."""


async def carry_out(
    cluster: Cluster, pipeline: InferencePipeline, folder: Path, task_name: str, options: ProfileOptions | None = None
) -> dict[str, ModelProfile]:
    """Measure a task of a pipeline and write its profiles.

    Args:
        cluster: where to write them.
        pipeline: as the operator wrote it for this Job, with its namespace.
        folder: relative storage URIs start here.
        task_name: one of `profile_tasks(pipeline)`.
        options: None means quick ones.

    Raises:
        TaskError: there is no such task, or nothing of it can be measured.
        ProfileError: a variant cannot be loaded or refuses a batch.
        ClusterError: the profiles cannot be written.
    """
    task = task_of(pipeline, task_name)
    only = measurable(pipeline, task)
    owner = await _persistently(lambda: cluster.get("InferencePipeline", pipeline.metadata.namespace, pipeline.name))
    if owner is None:
        raise TaskError(f"InferencePipeline {pipeline.metadata.namespace}/{pipeline.name} is gone: nothing to profile")
    started = time.monotonic()
    log.info("measuring %s on %d cores, load %.1f", _names(only), usable_cores(), os.getloadavg()[0])
    profiles = await profile(pipeline, folder, options or ProfileOptions.quick(pipeline, only), _tell)
    for stage, found in profiles.items():
        body = profile_body(found, pipeline, task, owner)
        await _persistently(lambda body=body: cluster.apply(body, manager=PROFILER_MANAGER))
        log.info("%s: %d points written to ModelProfile %s", stage, len(found.spec.points), body["metadata"]["name"])
    log.info("done in %.0f s", time.monotonic() - started)
    return profiles


def task_of(pipeline: InferencePipeline, name: str) -> ProfileTask:
    """A task by its name; TaskError names the ones there are."""
    tasks = {task.name: task for task in profile_tasks(pipeline)}
    if name not in tasks:
        raise TaskError(f"pipeline {pipeline.name} has no profile task {name!r}; it has: {', '.join(tasks) or 'none'}")
    return tasks[name]


def measurable(pipeline: InferencePipeline, task: ProfileTask) -> dict[str, tuple[str, ...]]:
    """The variants of a task that can run in this pod, by stage; TaskError where none can."""
    only: dict[str, tuple[str, ...]] = {}
    for stage in task.stages:
        variants = [pipeline.spec.stage(stage).variant(name) for name in task.of_stage(stage)]
        for variant in variants:
            if variant.container is not None:
                log.warning("stage %s, variant %s has a container of its own: left out", stage, variant.name)
        named = tuple(variant.name for variant in variants if variant.container is None)
        if named:
            only[stage] = named
    if not only:
        raise TaskError(f"task {task.name}: its variants have containers of their own; apply a ModelProfile for them")
    return only


def profile_body(profile: ModelProfile, pipeline: InferencePipeline, task: ProfileTask, owner: Object) -> Object:
    """A profile as it is written: named by its stage and kind of node, owned by its pipeline."""
    body: Object = profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    body["metadata"] = {
        "name": profile_name(pipeline.name, profile.spec.stage, task.name),
        "namespace": pipeline.metadata.namespace,
        "labels": {PIPELINE_LABEL: pipeline.name, MANAGED_BY: PROFILER_MANAGER},
        "annotations": {FINGERPRINT_ANNOTATION: task.fingerprint},
        "ownerReferences": [owner_reference(owner)],
    }
    return body


def _tell(progress: Progress) -> None:
    measured = progress.measurement
    log.info(
        "%d/%d %s %s %s: batch %d in %.1f ms, %.0f rows/s",
        *(progress.done, progress.total, progress.stage, progress.variant, progress.operating_point),
        *(measured.batch_size, 1000 * measured.latency_seconds_p50, measured.throughput_rps),
    )


def _names(only: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"{stage}: {', '.join(names)}" for stage, names in only.items())


async def _persistently(ask: Any) -> Any:
    """Ask the API server until it answers: minutes of measuring are not lost to one that restarts."""
    pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    for _ in range(WRITE_ATTEMPTS - 1):
        try:
            return await ask()
        except Rejected:
            raise
        except ClusterError as error:
            pause_seconds = pauses.next_seconds(error)
            log.warning("%s; again in %.1f s", error, pause_seconds)
            await asyncio.sleep(pause_seconds)
    return await ask()
