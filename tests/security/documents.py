"""Random pipelines, profiles and plans, given to operator, adapter and router as their watches give them."""

import asyncio
import copy
import functools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.builders import a_body, a_chat_point, a_point_profile, a_profile
from tests.security.generators import ODD_FLOATS, ODD_NUMBERS, ODD_TEXTS, change_json
from trimtab_adapter.cluster.config_source import ClusterCache, ClusterConfigSource
from trimtab_adapter.cluster.plan_publisher import ClusterPlanPublisher
from trimtab_adapter.cluster.status import build_status
from trimtab_adapter.control_loop import ControlLoop, LoadSources
from trimtab_adapter.controller import Tick
from trimtab_adapter.forecasting import CurrentForecaster, TrainedWeights
from trimtab_adapter.observation import Load
from trimtab_adapter.planning.decide import initial_plan
from trimtab_kubernetes.client import METADATA, Listing
from trimtab_kubernetes.connection import JSON
from trimtab_kubernetes.objects import Object, rfc3339
from trimtab_operator.controller import Controller
from trimtab_operator.metrics import Metrics
from trimtab_operator.settings import Settings
from trimtab_pipelines.documents import DocumentError, parse
from trimtab_pipelines.kubernetes_names import PIPELINE_LABEL
from trimtab_pipelines.profile import profiles_by_stage
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.router import Router
from trimtab_router.watchers.cluster_watcher import ClusterWatcher

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*/*.yaml"))
NAMESPACE = "team"
NOW = 1_800_000_000.0
ODD: tuple[str, ...] = (
    *ODD_TEXTS,
    "1e400",
    "0.0000001",
    "-1",
    "NaN",
    "\ud800",
    "ſ",
    ".",
    "a.b.c.d",
    "https://[",
    "s3://",
)
ODD += ("request.inputs.x", "encode.outputs.y", "random://?seed=" + "9" * 400)
AMOUNTS = ("0s", "1ms", "0.001ms", "1e9s", "999999999h", "0", "1n", "0.5", "1", "64", "1M", "999999999T", "9" * 32)
SIZES = (1e-300, 1e-9, 0.25, 3, 64, 1000, 1e6, 1e9, 1e15, 1e150, 1e300)
LOADS_RPS = (0.0, 1.0, 37.0, 1e4)


@dataclass
class Documents:
    """The objects of one pipeline in a cluster."""

    pipeline: Object
    profiles: list[Object]
    plan: Object
    changed: str = ""

    @property
    def all(self) -> list[Object]:
        return [as_served(each) for each in (self.pipeline, *self.profiles, self.plan)]

    @property
    def key(self) -> tuple[str, str]:
        return NAMESPACE, self.pipeline["metadata"]["name"]


def as_served(value: Any) -> Any:
    """A copy as API servers write it: Go's JSON has numbers of 64 bits, and no half of a surrogate pair."""
    match value:
        case dict():
            return {as_served(key): as_served(each) for key, each in value.items()}
        case list():
            return [as_served(each) for each in value]
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case int() if not -(2**63) <= value < 2**63:
            return max(min(value, 10**308), -(10**308)) * 1.0
    return value


@functools.cache
def an_example(path: Path) -> Documents:
    """An example pipeline with the forecaster of the least cost, its profiles and its first plan."""
    written = yaml.safe_load(path.read_text())
    written["spec"]["adaptation"] = written["spec"].get("adaptation", {}) | {"forecaster": "Reactive"}
    pipeline = InferencePipeline.model_validate(written)
    profiles = []
    for stage in pipeline.spec.stages:
        law = (0.004, 0.002)
        points = [
            a_chat_point(variant.name, law, law, law, law, tokens=20).replace(
                operating_point=point.name, cores=variant.resources.cpu
            )
            if stage.generates
            else a_point_profile(variant.name, *law, cores=variant.resources.cpu, point=point.name)
            for variant in stage.variants
            for point in variant.points
        ]
        profiles.append(a_profile(stage.name, points[:256], pipeline.name))
    plan = initial_plan(pipeline, profiles_by_stage(profiles), now_seconds=NOW)
    stored = [pipeline, *profiles, plan]
    bodies = [a_body(each, namespace=NAMESPACE, uid=f"u{n}", generation=1) for n, each in enumerate(stored)]
    for number, body in enumerate(bodies, 1):
        body["metadata"]["resourceVersion"] = str(number)
    time = rfc3339(NOW - 30)
    bodies[0]["status"] = {"schedulable": {"cores": "64", "gpus": 0, "since": time, "message": "no node"}}
    given_up = {
        "type": "Applied",
        "status": "False",
        "reason": "ReadyTimeout",
        "message": "late",
        "observedGeneration": 1,
    }
    bodies[-1]["status"] = {"conditions": [given_up | {"lastTransitionTime": time}]}
    return Documents(bodies[0], bodies[1:-1], bodies[-1])


def some_documents(draw: Random) -> Documents:
    """An example, of which one document is changed in one place to four."""
    documents = copy.deepcopy(an_example(draw.choice(EXAMPLES)))
    documents.changed = draw.choice(("pipeline", "profile", "plan"))
    chosen = {"pipeline": documents.pipeline, "plan": documents.plan}.get(documents.changed)
    changed = chosen if chosen is not None else draw.choice(documents.profiles)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if draw.random() < 0.03:
            changed["apiVersion"] = draw.choice(("trimtab.dev/v2", "", "v1"))
        elif "status" in changed and draw.random() < 0.1:
            _change_leaf(draw, changed["status"])
        elif draw.random() < 0.6:
            _change_leaf(draw, changed["spec"])
        else:
            changed["spec"] = change_json(draw, changed["spec"])
        if not isinstance(changed["spec"], dict):
            break
    return documents


def _change_leaf(draw: Random, value: Any) -> None:
    """Put an odd text, or a text from elsewhere in the document, in the place of a leaf."""
    leaves = list(_leaves(value))
    if leaves:
        owner, key = draw.choice(leaves)
        kind = type(owner[key])
        alike = [other[name] for other, name in leaves if type(other[name]) is kind]
        match draw.randrange(4):
            case 0:
                owner[key] = draw.choice(alike)
            case 1 if kind in {int, float}:
                owner[key] = draw.choice((*SIZES, *ODD_NUMBERS, *ODD_FLOATS))
            case 2 if kind in {int, float}:
                owner[key] = kind(owner[key] * draw.choice((1e-9, 0.1, 10, 1e9)))
            case 1 | 2:
                owner[key] = draw.choice(AMOUNTS)
            case _:
                owner[key] = draw.choice(ODD)


def _leaves(value: Any) -> Any:
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(part, dict | list):
            yield from _leaves(part)
        else:
            yield value, key


class Defects(logging.Handler):
    """Exceptions that a component logs instead of a refusal."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: list[BaseException] = []

    def require_none(self) -> None:
        if self._found:
            raise self._found[0]

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found.append(record.exc_info[1])


@dataclass
class Storage:
    """An API server that stores what it is given, and of which each list has these objects."""

    objects: list[Object] = field(default_factory=list)
    watched: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released by each kind whose list was read."""
    statuses: list[Object] = field(default_factory=list)

    async def pages(self, kind: str, *_: object, accept: str = JSON) -> AsyncIterator[Listing]:
        found = [each for each in self.objects if each["kind"] == kind]
        names = [{"kind": kind, "metadata": each["metadata"]} for each in found]
        yield Listing(names if accept == METADATA else found, "9")

    async def both_watched(self) -> None:
        await self.watched.acquire()
        await self.watched.acquire()

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, Object]]:
        self.watched.release()
        await asyncio.Event().wait()
        yield "", {}

    async def get(self, *_: object) -> None:
        return None

    async def apply(self, body: Object, *, subresource: str | None = None, **_: object) -> Object:
        if subresource:
            self.statuses.append(body)
        return copy.deepcopy({"spec": {}} | body | {"metadata": {"uid": "u", "generation": 1} | body["metadata"]})

    async def create(self, body: Object, **_: object) -> Object:
        return body

    async def delete(self, *_: object, **__: object) -> bool:
        return True


async def operate(documents: Documents) -> str:
    """Let the operator reconcile once; returns its refusal of the pipeline or of the plan."""
    storage: Any = Storage(documents.all)
    controller = Controller(storage, Settings(), Metrics(), lambda: NOW)
    await controller.resync()
    await controller.reconcile(documents.key)
    found = {c["type"]: c for status in storage.statuses for c in status["status"]["conditions"]}
    refused = [c["message"] for c in found.values() if c["reason"] in {"InvalidSpec", "PlanRejected"}]
    return refused[0] if refused else ""


async def adapt(documents: Documents, draw: Random) -> str:
    """Let the adapter plan once; returns its refusal of the pipeline, or why it holds the plan."""
    cache, storage, load_rps = ClusterCache(), Storage(), draw.choice(LOADS_RPS)
    for each in documents.all:
        cache.put(each)

    class Loads:
        async def load(self, now_seconds: float, seconds: int = 600) -> Load:
            return Load(now_seconds, (load_rps,) * seconds)

    ticks: list[Tick] = []

    async def report(tick: Tick) -> None:
        ticks.append(tick)

    try:
        config = ClusterConfigSource(cache, documents.key)
    except DocumentError as error:
        return str(error)
    publisher = ClusterPlanPublisher(storage, cache, documents.key, report)  # type: ignore[arg-type]
    forecaster = CurrentForecaster(lambda: config.pipeline.spec.adaptation, TrainedWeights(None))
    await ControlLoop(config, publisher, LoadSources(Loads(), None), forecaster).tick(NOW)
    build_status(ticks[-1], {}, 1)
    return ticks[-1].problem


async def route(documents: Documents) -> str:
    """Let a router of the pipeline watch plan and replicas; returns its refusal of the pipeline or of the plan."""
    try:
        pipeline = parse(InferencePipeline, copy.deepcopy(documents.pipeline), "pipeline.yaml")
    except DocumentError as error:
        return str(error)
    router, storage = Router(pipeline), Storage([*documents.all, *_slices(pipeline)])
    watching = asyncio.create_task(ClusterWatcher(router, storage, NAMESPACE).watch())  # type: ignore[arg-type]
    tasks = [watching, asyncio.create_task(storage.both_watched())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()
    watching.cancel()
    router.wait_for_tables()
    router.state()
    await router.drain(0.0)
    return "the plan of spec does not fit" if router.plan is None else ""


def _slices(pipeline: InferencePipeline) -> list[Object]:
    return [
        {
            "kind": "EndpointSlice",
            "metadata": {"name": stage.name, "namespace": NAMESPACE, "labels": {PIPELINE_LABEL: pipeline.name}},
            "endpoints": [],
        }
        for stage in pipeline.spec.stages
    ]
