"""A pipeline and its profiles as the API server has them: what can be used of the budget, and all points of a stage."""

import logging
from collections.abc import Mapping

from trimtab_adapter.cluster.cluster_cache import PIPELINE, PROFILE, ClusterCache
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.documents import DocumentError, parse
from trimtab_pipelines.profile import ModelProfile, profiles_by_stage
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION
from trimtab_pipelines.quantity import format_cores, parse_quantity
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import Schedulable

log = logging.getLogger(__name__)


class ClusterConfigSource:
    """One pipeline, parsed again when it or a profile of its changed."""

    def __init__(self, known: ClusterCache, key: Key) -> None:
        """Raise DocumentError where the pipeline as it is cannot be used."""
        self._cache, self._key = known, key
        self._seen: tuple[object, ...] = ()
        self._parsed: dict[str, tuple[str, ModelProfile | None]] = {}
        self.remark = ""
        self.profiles: Mapping[str, ModelProfile] = {}
        found = known.get(PIPELINE, key)
        if found is None:
            raise DocumentError(f"{PIPELINE} {key[0]}/{key[1]} is gone")
        self.pipeline = self._read_pipeline(found)
        self.refresh()

    @property
    def uid(self) -> str:
        """The identity of the pipeline's object."""
        return str((self._cache.get(PIPELINE, self._key) or {"metadata": {}})["metadata"].get("uid", ""))

    def refresh(self) -> str | None:
        """Read what changed; return what is wrong with it, or None."""
        found = self._cache.get(PIPELINE, self._key)
        profiles = list(self._cache.owned_by(PROFILE, *self._key))
        seen = (_version(found), *sorted((_name(profile), _version(profile)) for profile in profiles))
        if seen == self._seen:
            return None
        self._seen = seen
        readable = filter(None, map(self._read_profile, profiles))
        self.profiles = profiles_by_stage(sorted(readable, key=_precedence, reverse=True))
        if found is None:
            return None
        try:
            self.pipeline = self._read_pipeline(found)
        except DocumentError as error:
            return f"{error}; the last good pipeline stays in use"
        return None

    def _read_pipeline(self, found: Object) -> InferencePipeline:
        pipeline = parse(InferencePipeline, found, f"{PIPELINE} {self._key[0]}/{self._key[1]}")
        pipeline, self.remark = limit_to_schedulable(pipeline)
        return pipeline

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
    """The pipeline with the budget its nodes have room for, and a remark where that is less, or cannot be read."""
    told = (pipeline.status or {}).get("schedulable")
    if told is None:
        return pipeline, ""
    budget = pipeline.spec.budget
    try:
        schedulable = _read_schedulable(told)
        room = parse_quantity(schedulable.cores)
    except (DocumentError, ValueError) as error:
        return pipeline, f"what the nodes have room for cannot be read, so the whole budget counts: {error}"
    cores, gpus = min(budget.cores, room), min(budget.gpus, schedulable.gpus)
    if (cores, gpus) == (budget.cores, budget.gpus):
        return pipeline, ""
    usable = budget.model_copy(update={"cores": cores, "gpus": gpus})
    spec = pipeline.spec.model_copy(update={"budget": usable})
    wanted = f"{format_cores(budget.cores)} cores" + (f" and {budget.gpus} GPUs" if budget.gpus else "")
    found = f"{format_cores(cores)} cores" + (f" and {gpus} GPUs" if budget.gpus else "")
    remark = f"the nodes have room for {found} of the {wanted} of the budget"
    return pipeline.model_copy(update={"spec": spec}), remark


def _read_schedulable(told: object) -> Schedulable:
    """What the operator wrote, of which a later release may write more; raises DocumentError."""
    given = told if isinstance(told, Mapping) else {}
    known = {name: given[name] for name in Schedulable.model_fields if name in given}
    return parse(Schedulable, known, "status.schedulable")


def _precedence(profile: ModelProfile) -> tuple[bool, str]:
    """Of two profiles with the same point a user's counts (it carries no fingerprint), then that of the first name."""
    return FINGERPRINT_ANNOTATION in profile.metadata.annotations, profile.metadata.name


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _version(found: Object | None) -> str:
    return "" if found is None else str(found["metadata"].get("resourceVersion", ""))
