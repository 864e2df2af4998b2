"""Served system: a pipeline by one policy on this machine, its replicas limited to their cores, under a known load."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.papers.policies import policies_in_child_processes
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_adapter.planning.baselines import with_pins
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.interface import PayloadSource
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_endpoints, load_pipeline, load_profiles, write_json
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_profiler.profile import PROFILE_FILE, ProfileOptions, profile, write_profiles

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_PERIOD_MICROSECONDS = 10_000
PLAN_POLLS, PLAN_POLL_SECONDS, SETTLE_SECONDS = 600, 0.05, 0.5
"""How often the router is asked whether it follows a plan, and how long the new plan settles."""
HALVINGS = 4
_cgroup_numbers = count()
Profiles = Mapping[str, ModelProfile]


@contextmanager
def limit_cores(process: int, cores: float) -> Iterator[bool]:
    """Limit a process to a share of a core, as a container's limits do; yields whether this machine can.

    Without it, a benchmark on a machine that everything shares measures what else runs there.
    """
    name = f"trimtab-bench-{os.getpid()}-{next(_cgroup_numbers)}"
    folder = next((f / name for f in (CGROUPS / "cpu", CGROUPS) if (f / "cgroup.procs").exists()), None)
    if folder is None or not _make_cgroup(folder, cores):
        sys.stderr.write("this machine limits no process to its cores: the replica takes what it gets\n")
        yield False
        return
    try:
        (folder / "cgroup.procs").write_text(str(process))
        yield True
    finally:
        for process_id in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # it has ended since
                (folder.parent / "cgroup.procs").write_text(process_id)
        folder.rmdir()


def _make_cgroup(folder: Path, cores: float) -> bool:
    """Make a group with a share of a core; none is left if its share cannot be set."""
    quota = round(cores * CGROUP_PERIOD_MICROSECONDS)
    try:
        folder.mkdir()
    except OSError:
        return False
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {CGROUP_PERIOD_MICROSECONDS}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(CGROUP_PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        folder.rmdir()
        return False
    return True


async def cached_profiles(source: Path, out: Path, variants: Mapping[str, Sequence[str]]) -> Profiles:
    """Return the profiles that an earlier run left in `out`; else profile these variants of the pipeline quickly."""
    if not _is_profiled(out):
        pipeline = load_pipeline(source / "pipeline.yaml")
        options = ProfileOptions.quick(pipeline, variants)
        write_profiles(await profile(pipeline, source, options, lambda _: None), out)
    return load_profiles(out / PROFILE_FILE)


def _is_profiled(out: Path) -> bool:
    out.mkdir(parents=True, exist_ok=True)
    return (out / PROFILE_FILE).exists()


def slow_down(profiles: Profiles, times: float) -> dict[str, ModelProfile]:
    """Return the profiles of a machine on which every batch takes `times` as long."""
    slower = {}
    for name, original in profiles.items():
        document = original.model_dump(by_alias=False)
        for point in document["spec"]["points"]:
            point["fit"] |= {term: point["fit"][term] * times for term in ("quadratic", "linear", "constant")}
            for measurement in point["measurements"]:
                measurement["throughput_rps"] /= times
                seconds = [field for field in measurement if field.startswith("latency_seconds")]
                measurement |= {field: measurement[field] * times for field in seconds}
        slower[name] = ModelProfile.model_validate(document)
    return slower


def write_pipeline(source: Path, folder: Path, **spec: Any) -> InferencePipeline:
    """Write a pipeline's folder with other fields of its spec; the weights are those of `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "weights").exists():
        (folder / "weights").symlink_to((source / "weights").resolve())
    document = yaml.safe_load((source / "pipeline.yaml").read_text(encoding="utf-8"))
    document["spec"] |= spec
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_pipeline(folder / "pipeline.yaml")


def plan_pinned(
    pipeline: InferencePipeline, profiles: Profiles, pins: Mapping[str, Pin], *, rps: float, rows: float = 1.0
) -> PipelinePlan:
    """Return what the adapter plans for a known load, with a pin and so many rows a request for each stage."""
    pinned = pipeline.replace(spec=with_pins(pipeline.spec, pins))
    forecast = ForecastRecord(peak_rps=rps, source="static", reason="the load, known beforehand")
    return decide(pinned, profiles, PlanningInputs(forecast, 0.0, rows_per_request=dict.fromkeys(pins, rows)))


Holds = Callable[[float], Awaitable[bool]]
"""Tries a rate, requests a second."""


async def search_goodput(holds: Holds, first_rps: float, max_rps: float = inf) -> float:
    """Return the highest rate that holds, requests a second; 0 if no tried rate does.

    The rate is doubled until it fails; the range between is halved four times.
    """
    low, high = 0.0, first_rps
    while high <= max_rps and await holds(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if await holds(middle) else (low, middle)
    return low


@dataclass(slots=True)
class ServedPipeline:
    """A pipeline that is served, and the plan in force."""

    pipeline: InferencePipeline
    supervisor: Supervisor
    is_limited: bool
    """Whether the replicas are limited to their cores."""
    plan: PipelinePlan

    @property
    def router_pid(self) -> int | None:
        """The router's process; another one after it was replaced, None while there is none."""
        return None if self.supervisor.router is None else self.supervisor.router.pid

    def replica_address(self, stage: str) -> str:
        """Return HOST:PORT of the stage's only replica, past the router."""
        (replica,) = load_endpoints(self.supervisor.replica_manager.site.endpoints_file).stages[stage]
        return replica.address

    async def follow(self, plan: PipelinePlan) -> None:
        """Have the router follow a plan as the next generation."""
        generation = self.plan.spec.generation + 1
        self.plan = plan.with_spec(generation=generation)
        write_json(self.supervisor.plan_file, self.plan)
        for _ in range(PLAN_POLLS):
            if (await self.supervisor.client.state()).plan_generation >= generation:
                await asyncio.sleep(SETTLE_SECONDS)
                return
            await asyncio.sleep(PLAN_POLL_SECONDS)
        raise RuntimeError("the router does not follow its plan")

    async def attack(
        self,
        load: LoadSpec,
        seconds: float,
        source: PayloadSource,
        *,
        seed: int = 1,
        arrivals: NDArray[np.float64] | None = None,
        max_payloads: int = 8192,
    ) -> Results:
        """Offer an open-loop load under the plan in force, and wait for the last response."""
        options = AttackOptions(duration_seconds=seconds, seed=seed, max_payloads=max_payloads)
        address = f"127.0.0.1:{self.supervisor.rest_port}"
        return await attack_async(self.pipeline, address, load, options, source=source, arrivals=arrivals)


@asynccontextmanager
async def serve(
    folder: Path, pipeline: InferencePipeline, plan: PipelinePlan, cores: float | None = None
) -> AsyncIterator[ServedPipeline]:
    """Serve the pipeline of a folder while the block runs; each replica gets `cores`, or else what it requests.

    Each has a limit of its own: in a group with others, one that always computes takes their share too.
    """
    setup = Setup(folder / "pipeline.yaml", folder / "run", plan=plan)
    with policies_in_child_processes():
        async with Supervisor(setup) as supervisor:
            await supervisor.ready()
            manager = supervisor.replica_manager
            with ExitStack() as limits:
                limited = [
                    limits.enter_context(limit_cores(manager.pids[replica.name], cores or replica.cores))
                    for replica in manager.replicas
                ]
                yield ServedPipeline(pipeline, supervisor, all(limited), plan)
