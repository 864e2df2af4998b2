"""Serves vit-tasks' finer transformer by one policy, and offers it loads of plateaus and bursts."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import yaml
from numpy.typing import NDArray

from benchmarks.modalities.holding import held
from benchmarks.modalities.setting import slowed
from benchmarks.papers.policies import policies_in_child_processes
from benchmarks.tokens_served.outcome import Run
from benchmarks.tokens_served.queries import QUERIES, Queries
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_adapter.planning.baselines import with_pins
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_endpoints, load_pipeline, write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan, PointPlan, unmeasured_point_plan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_predictor.trace import read_trace
from trimtab_router.scheduling.policies.interface import DropPolicy

SOURCE = Path(__file__).parents[2] / "pipelines" / "vit-tasks"
CORES = 0.5
"""What the replica is held to, so that all else has enough; profiles are those of a whole core."""
STAGE, VARIANT, BATCH = "classify", "vit-fine", 8
PLAIN = "full"
SHAPE = np.array([0.5, 0.5, 1.0, 1.0, 0.7, 2.0, 0.7, 0.4, 1.3, 1.3, 1.3, 0.6, 2.2, 0.5, 1.0, 1.0])
"""Plateaus and bursts: the rate in each second, as a multiple of what the load is said to be."""
FOLLOWED_TRIES, WATCH_SECONDS = 600, 0.1


@dataclass(slots=True)
class Serving:
    """A policy that is being served."""

    method: str
    plan: PipelinePlan
    local: Supervisor
    pipeline: InferencePipeline
    points: list[PointPlan]
    queries: Queries
    shape: NDArray[np.float64]

    async def keep_to(self, point: PointPlan, method: str = "") -> None:
        """From now on one point alone, without second looks, and under another name."""
        stage = self.plan.spec.stages[0].model_copy(
            update={
                "operating_point": point.name,
                "accuracy": point.accuracy,
                "accuracy_by_task": point.accuracy_by_task,
                "service_seconds": point.service_seconds,
                "escalations": (),
                "planned_escalation": None,
                "upgrades": (),
                "fallbacks": (),
            }
        )
        generation = self.plan.spec.generation + 1
        spec = self.plan.spec.model_copy(update={"stages": (stage,), "generation": generation})
        self.plan = self.plan.model_copy(update={"spec": spec})
        self.method = method or f"always {point.name}"
        write_json(self.local.plan_file, self.plan)
        for _ in range(FOLLOWED_TRIES):
            if (await self.local.client.state()).plan_generation >= generation:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError("the router does not follow its plan")

    async def offer(self, rps: float, seconds: int, seed: int = 1) -> Run:
        """Offer a load in open loop, and wait for the last answer."""
        load = LoadSpec.from_counts(around(self.shape, rps, seconds), f"plateaus and bursts around {rps:g}/s")
        options = AttackOptions(duration_seconds=float(seconds), seed=seed, max_payloads=8192)
        watching = asyncio.ensure_future(self._queued())
        before = self._replica_seconds()
        address = f"127.0.0.1:{self.local.rest_port}"
        results = await attack_async(self.pipeline, address, load, options, source=self.queries)
        busy = (self._replica_seconds() - before) / seconds
        watching.cancel()
        queued = await watching
        kinds = self.kinds(results)
        return Run(
            method=self.method,
            results=results,
            deadlines=np.array([self.queries.seconds(kind) for kind in kinds]),
            utilities=np.array([QUERIES[kind].utility for kind in kinds]),
            busy_share=busy,
            most_queued=max(queued, default=0),
            mean_queued=float(np.mean(queued)) if queued else 0.0,
        )

    def kinds(self, results: Results) -> list[int]:
        """Of which type each query was."""
        return [self.queries.kind(i % results.facts.distinct_payloads) for i in range(len(results.records))]

    @property
    def replica_url(self) -> str:
        """The model at its only replica, past the router."""
        (replica,) = load_endpoints(self.local.replica_manager.site.endpoints_file).stages[STAGE]
        return f"http://{replica.address}/v2/models/{VARIANT}"

    async def _queued(self) -> list[int]:
        seen: list[int] = []
        try:
            while True:
                seen.append((await self.local.client.state()).stages[STAGE].queue_rows)
                await asyncio.sleep(WATCH_SECONDS)
        except asyncio.CancelledError:
            return seen

    def _replica_seconds(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.local.replica_manager.pids.values()]
        return sum(one.user + one.system for one in times)


def plain(points: Sequence[PointPlan]) -> PointPlan:
    """The transformer as it is."""
    return point_named(points, PLAIN)


def point_named(points: Sequence[PointPlan], name: str) -> PointPlan:
    """One of the points."""
    return next(point for point in points if point.name == name)


def around(shape: NDArray[np.float64], rps: float, seconds: int) -> NDArray[np.float64]:
    """The rate in each second: a shape over and over, with a mean of `rps` over one."""
    return np.resize(shape / shape.mean(), seconds) * rps


def shape_of(trace: Path | None, start_seconds: int, seconds: int) -> NDArray[np.float64]:
    """How the load goes, one value a second; seconds that a trace lacks send nothing.

    Raises:
        TraceError: the trace cannot be read, or has not these seconds.
    """
    if trace is None:
        return SHAPE
    return np.nan_to_num(read_trace(trace).excerpt(start_seconds, start_seconds + seconds).rps)


def written(
    source: Path, folder: Path, policy: str, slo_seconds: float, drops: DropPolicy = "Predicted"
) -> InferencePipeline:
    """Lay out the pipeline as one policy serves it, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").symlink_to((source / "weights").resolve())
    document = yaml.safe_load((source / "pipeline.yaml").read_text(encoding="utf-8"))
    document["spec"] |= {"schedulingPolicy": policy, "dropPolicy": drops}
    document["spec"]["slo"] = {"latency": f"{1000 * slo_seconds:g}ms"}
    document["spec"]["queue"] = {"maxRows": 4096}
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_pipeline(folder / "pipeline.yaml")


def plan_for(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> PipelinePlan:
    """One replica of the finer transformer in small batches, with every point worth having."""
    pin = Pin(variant=VARIANT, replicas=1, batch_size=BATCH)
    pinned = pipeline.model_copy(update={"spec": with_pins(pipeline.spec, {STAGE: pin})})
    forecast = ForecastRecord(peak_rps=1.0, source="static", reason="the load, known beforehand")
    plan = decide(pinned, profiles, PlanningInputs(forecast, 0.0))
    return plan.model_copy(update={"spec": plan.spec.model_copy(update={"generation": 1})})


def every_point(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> list[PointPlan]:
    """All points of the finer transformer, those too that no plan would have."""
    stage = pipeline.spec.stage(STAGE)
    variant = stage.variant(VARIANT)
    found = []
    for point in variant.points:
        known = profiles[STAGE].spec.point(VARIANT, point.name, variant.resources.cpu)
        if known is None:
            raise RuntimeError(f"point {point.name} was not measured")
        seconds = {size: known.latency_seconds(size, 0.5) for size in stage.batch_sizes}
        found.append(unmeasured_point_plan(point).model_copy(update={"service_seconds": seconds}))
    return found


@asynccontextmanager
async def serving(
    source: Path,
    folder: Path,
    method: str,
    policy: str,
    profiles: Mapping[str, ModelProfile],
    queries: Queries,
    *,
    shape: NDArray[np.float64] = SHAPE,
    drops: DropPolicy = "Predicted",
) -> AsyncIterator[Serving]:
    """Serve by a policy while the block runs; loads go as `shape` does."""
    slo_seconds = max(queries.seconds(kind) for kind in range(len(QUERIES)))
    pipeline, profiles = written(source, folder, policy, slo_seconds, drops), slowed(profiles, 1.0 / CORES)
    plan = plan_for(pipeline, profiles)
    setup = Setup(folder / "pipeline.yaml", folder / "run", profiles_file=None, plan=plan)
    with policies_in_child_processes():
        async with Supervisor(setup) as local:
            await local.ready()
            with held(local.replica_manager.pids.values(), CORES) as is_held:
                if not is_held:
                    sys.stderr.write("this machine holds no process to its cores: the replica takes what it gets\n")
                yield Serving(method, plan, local, pipeline, every_point(pipeline, profiles), queries, shape)
