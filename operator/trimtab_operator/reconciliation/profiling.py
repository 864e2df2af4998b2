"""Missing profiles of a pipeline, and the Jobs that measure them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_kubernetes.conditions import ConditionState, failing, ok
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import Ref
from trimtab_operator.manifests.profile_jobs import TTL_SECONDS, profile_job, profiler_account
from trimtab_operator.settings import Settings
from trimtab_pipelines.documents import DocumentError, parse
from trimtab_pipelines.kubernetes_names import profile_job_name
from trimtab_pipelines.memory_profile import MemoryProfiles
from trimtab_pipelines.profile import ModelProfile, memory_by_stage, profiles_by_stage
from trimtab_pipelines.profiling import ProfileTask, missing_profile_tasks, profile_tasks
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import condition_of

InvalidProfile = tuple[Object, str]
"""A ModelProfile that cannot be read, and the error."""


@dataclass(frozen=True, slots=True)
class ProfilingState:
    """Missing profiles and their Jobs."""

    missing: tuple[ProfileTask, ...]
    finding: ConditionState
    objects: tuple[Object, ...]
    """Jobs with their ServiceAccount."""
    invalid: tuple[InvalidProfile, ...] = ()
    memory: Mapping[str, MemoryProfiles] = field(default_factory=dict)
    """Measured memory by stage and variant."""


def profiling(
    pipeline: InferencePipeline, found: Sequence[Object], owned: Mapping[Ref, Object], settings: Settings
) -> ProfilingState:
    profiles, invalid = _parse_profiles(found)
    missing = missing_profile_tasks(pipeline, profiles)
    jobs = [profile_job(pipeline, task, settings) for task in missing]
    running = [ref for ref, job in owned.items() if ref.kind == "Job" and not _finished(job)]
    account = profiler_account(pipeline, settings) if jobs or running else []
    finding = _finding(pipeline, missing, owned)
    if invalid:
        ignored = "; ".join(f"ignored: {message}" for _, message in invalid)
        finding = replace(finding, message=f"{finding.message}; {ignored}")
    memory = memory_by_stage(profiles_by_stage(profiles))
    return ProfilingState(missing, finding, (*account, *jobs), tuple(invalid), memory)


def _parse_profiles(found: Sequence[Object]) -> tuple[list[ModelProfile], list[InvalidProfile]]:
    """Parse profiles; invalid ones count as missing."""
    profiles, invalid = [], []
    for document in found:
        try:
            profiles.append(parse(ModelProfile, document, f"ModelProfile {document['metadata']['name']}"))
        except DocumentError as error:
            invalid.append((document, str(error)))
    return profiles, invalid


def _finding(
    pipeline: InferencePipeline, missing: Sequence[ProfileTask], owned: Mapping[Ref, Object]
) -> ConditionState:
    kind, tasks = "ProfilesReady", profile_tasks(pipeline)
    if not missing:
        return ok(kind, "AllProfiled", "all variants are profiled")
    progress = f"{len(tasks) - len(missing)} of {len(tasks)} tasks done"
    for task in missing:
        name = profile_job_name(pipeline.name, task.name, task.run)
        job = owned.get(Ref("Job", name))
        if job is not None and (failure := _failure(job)):
            return failing(
                kind,
                "ProfileFailed",
                f"Job {name} failed: {failure}; see kubectl logs job/{name}. It is retried after {TTL_SECONDS} s",
            )
    names = [profile_job_name(pipeline.name, task.name, task.run) for task in missing]
    if any(Ref("Job", name) in owned for name in names):
        return failing(
            kind, "Profiling", f"{progress}; Job {names[0]} is running; the first plan follows when it is done"
        )
    return failing(kind, "ProfileMissing", f"{progress}; Job {names[0]} has not started")


def _failure(job: Object) -> str:
    failed = condition_of(job, "Failed")
    return f"{failed.get('reason', '')} {failed.get('message', '')}".strip() if failed.get("status") == "True" else ""


def _finished(job: Object) -> bool:
    return any(condition_of(job, kind).get("status") == "True" for kind in ("Complete", "Failed"))
