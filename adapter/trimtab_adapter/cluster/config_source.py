"""`ClusterConfigSource`: a pipeline and its profiles from the API server, limited to the schedulable budget.

They come from the `ClusterCache`, which holds pipelines, plans, profiles and router EndpointSlices.
"""

import logging
from collections.abc import Mapping, Sequence

from trimtab_adapter.planning.pool_allocation import limit_budget
from trimtab_kubernetes.cache import Cache
from trimtab_kubernetes.objects import Key, Object, key_of
from trimtab_pipelines.documents import DocumentError, parse, parse_pipeline
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.memory_profile import with_measured_memory
from trimtab_pipelines.profile import ModelProfile, memory_by_stage, profiles_by_stage
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION
from trimtab_pipelines.quantity import format_cores, parse_quantity
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import Schedulable

log = logging.getLogger(__name__)

PIPELINE, PROFILE, PLAN, SLICE = "InferencePipeline", "ModelProfile", "PipelinePlan", "EndpointSlice"
SERVICE_LABEL = "kubernetes.io/service-name"
SELECTORS = {PIPELINE: None, PROFILE: None, PLAN: None, SLICE: SERVICE_LABEL}
OwnerKey = tuple[str, str, str]
"""Kind, namespace and owner: the pipeline of a profile, the Service of a slice, the object itself otherwise."""


def owner_key(resource: Object) -> OwnerKey:
    kind, (namespace, owner) = resource["kind"], key_of(resource)
    if kind == PROFILE:
        owner = str(resource.get("spec", {}).get("pipeline", ""))
    elif kind == SLICE:
        owner = str(resource["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))
    return kind, namespace, owner


class ClusterCache(Cache[OwnerKey]):
    """Objects of the watched namespaces by kind and name, and by owner."""

    def __init__(self) -> None:
        super().__init__(owner_key)

    def owned_by(self, kind: str, namespace: str, owner: str) -> list[Object]:
        return self.group((kind, namespace, owner))


class ClusterConfigSource:
    """One pipeline, parsed again when it or one of its profiles changes."""

    def __init__(self, cache: ClusterCache, key: Key, flavors: Sequence[ResourceFlavor] = ()) -> None:
        """Raises DocumentError if the pipeline is invalid."""
        self._cache, self._key, self._flavors = cache, key, flavors
        self._versions: tuple[object, ...] = ()
        self._parsed: dict[str, tuple[str, ModelProfile | None]] = {}
        self.remark = ""
        self.profiles: Mapping[str, ModelProfile] = {}
        found = cache.get(PIPELINE, key)
        if found is None:
            raise DocumentError(f"{PIPELINE} {key[0]}/{key[1]} is gone")
        self.pipeline = self._read_pipeline(found)
        self.refresh()

    @property
    def uid(self) -> str:
        return str((self._cache.get(PIPELINE, self._key) or {"metadata": {}})["metadata"].get("uid", ""))

    def refresh(self) -> str | None:
        """Parse what changed; return the error, or None."""
        found = self._cache.get(PIPELINE, self._key)
        profiles = list(self._cache.owned_by(PROFILE, *self._key))
        versions = (_version(found), *sorted((_name(profile), _version(profile)) for profile in profiles))
        if versions == self._versions:
            return None
        self._versions = versions
        readable = filter(None, map(self._read_profile, profiles))
        self.profiles = profiles_by_stage(sorted(readable, key=_precedence, reverse=True))
        if found is None:
            return None
        try:
            self.pipeline = self._read_pipeline(found)
        except DocumentError as error:
            return f"{error}; the last valid pipeline stays in use"
        return None

    def _read_pipeline(self, found: Object) -> InferencePipeline:
        pipeline = parse_pipeline(found, f"{PIPELINE} {self._key[0]}/{self._key[1]}", self._flavors)
        pipeline, self.remark = limit_to_schedulable(pipeline)
        return with_measured_memory(pipeline, memory_by_stage(self.profiles))

    def _read_profile(self, found: Object) -> ModelProfile | None:
        name, version = _name(found), _version(found)
        if name not in self._parsed or self._parsed[name][0] != version:
            profile = None
            try:
                profile = parse(ModelProfile, found, f"{PROFILE} {self._key[0]}/{name}")
            except DocumentError as error:
                log.warning("%s; planning without it", error)
            self._parsed[name] = version, profile
        return self._parsed[name][1]


def limit_to_schedulable(pipeline: InferencePipeline) -> tuple[InferencePipeline, str]:
    """The pipeline with its budget limited to what the nodes can schedule, and a remark if that is less."""
    status = (pipeline.status or {}).get("schedulable")
    if status is None:
        return pipeline, ""
    budget = pipeline.spec.budget
    try:
        fields = status if isinstance(status, Mapping) else {}  # those of later releases are ignored
        known = {name: fields[name] for name in Schedulable.model_fields if name in fields}
        schedulable = parse(Schedulable, known, "status.schedulable")
        room = parse_quantity(schedulable.cores)
    except (DocumentError, ValueError) as error:
        return pipeline, f"status.schedulable cannot be read, so the whole budget is used: {error}"
    spec = limit_budget(pipeline.spec, room, schedulable.gpus)
    if spec == pipeline.spec:
        return pipeline, ""
    usable, whole = (
        f"{format_cores(each.cores)} cores" + (f" and {each.gpus} GPUs" if budget.gpus else "")
        for each in (spec.budget, budget)
    )
    remark = f"the nodes can schedule {usable} of the budget's {whole}"
    return pipeline.replace(spec=spec), remark


def _precedence(profile: ModelProfile) -> tuple[bool, str]:
    """Sort key of profiles with the same point: a user's (without fingerprint) wins, then the first name."""
    return FINGERPRINT_ANNOTATION in profile.metadata.annotations, profile.metadata.name


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _version(found: Object | None) -> str:
    return "" if found is None else str(found["metadata"].get("resourceVersion", ""))
