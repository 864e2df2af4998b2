"""Serves one setting with its router, its door and a replica, and offers it one load after the other."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.modalities.holding import held
from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import Jobs, Setting, plan_for, slowed
from benchmarks.papers.policies import policies_in_child_processes
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.run_folder import RunFolder
from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.sources import PayloadSource
from trimtab_pipelines.documents import load_pipeline, write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.profile import write_profiles

FOLLOWED_TRIES = 600
SETTLED_SECONDS = 0.5


@dataclass(slots=True)
class Serving:
    """A setting that is being served."""

    setting: Setting
    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    local: Supervisor
    is_held: bool
    generation: int = field(default=1)

    @property
    def router(self) -> int | None:
        """The process that routes; another one where it was replaced, None while there is none."""
        return None if self.local.router is None else self.local.router.pid

    async def offer(self, jobs: Jobs, jobs_rps: float, seconds: float, seed: int = 1) -> Run:
        """Offer a load in open loop, under the plan for it, and wait for the last answer."""
        await self.follow(jobs_rps, jobs.mean_rows)
        return await self.load(jobs, jobs_rps, seconds, seed)

    async def load(self, jobs: Jobs, jobs_rps: float, seconds: float, seed: int = 1) -> Run:
        """The same under whatever plan is in force."""
        asked = load_pipeline(self.setting.asked(jobs))
        # A payload each, where they are few: those that take turns would have a broken sense mend itself.
        options = AttackOptions(duration_seconds=seconds, seed=seed)
        options = replace(options, max_payloads=max(options.max_payloads, ceil(1.2 * jobs_rps * seconds)))
        return await self._sent(asked, LoadSpec.parse(f"constant:{jobs_rps:g}"), options)

    async def play(self, source: PayloadSource, arrivals: NDArray[np.float64], seconds: float, seed: int = 1) -> Run:
        """Send jobs when they are due, and wait for the last answer; the same under whatever plan is in force."""
        options = AttackOptions(duration_seconds=seconds, seed=seed, max_payloads=max(arrivals.size, 1))
        load = LoadSpec.parse(f"constant:{arrivals.size / seconds:g}")
        return await self._sent(self.pipeline, load, options, source, arrivals)

    async def _sent(
        self,
        asked: InferencePipeline,
        load: LoadSpec,
        options: AttackOptions,
        source: PayloadSource | None = None,
        arrivals: NDArray[np.float64] | None = None,
    ) -> Run:
        before, address = self._cpu_seconds(), f"127.0.0.1:{self.local.rest_port}"
        results = await attack_async(asked, address, load, options, source=source, arrivals=arrivals)
        after, seconds = self._cpu_seconds(), results.facts.duration_seconds
        busy = {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}
        return Run(self.setting.method, float(load.pattern_rps.mean()), results, busy, options.seed)

    async def follow(self, jobs_rps: float, mean_rows: float) -> PipelinePlan:
        """Have the router follow the plan for a load; returns the plan."""
        self.generation += 1
        plan = plan_for(self.setting, self.pipeline, self.profiles, jobs_rps, mean_rows, self.generation)
        write_json(self.local.plan_file, plan)
        for _ in range(FOLLOWED_TRIES):
            if (await self.local.client.state()).plan_generation >= self.generation:
                await asyncio.sleep(SETTLED_SECONDS)
                return plan
            await asyncio.sleep(0.05)
        raise RuntimeError("the router does not follow its plan")

    def _cpu_seconds(self) -> dict[str, float]:
        fronts = {"router": self.local.router, "door": self.local.proxy}
        pids = {name: front.pid for name, front in fronts.items() if front is not None}
        pids |= {**self.local.replica_manager.pids, "generator": psutil.Process().pid}
        times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
        return {name: one.user + one.system for name, one in times.items()}


@asynccontextmanager
async def serving(
    setting: Setting, profiles: Mapping[str, ModelProfile], *, watched: bool = False
) -> AsyncIterator[Serving]:
    """Serve a setting while the block runs, its replica held to its cores; profiles are those of a whole core.

    With `watched` the adapter plans; else it keeps to the plan of each load.
    """
    pipeline, known = setting.write(), slowed(profiles, setting.misjudged / setting.cores)
    file = write_profiles(known, setting.folder) if watched else None
    plan = plan_for(setting, pipeline, known, 1.0, 1.0, 1)
    with RunFolder(setting.folder / "run") as run, policies_in_child_processes():
        async with Supervisor(Setup(setting.file, run, profiles_file=file, plan=plan)) as local:
            await local.ready()
            with held(local.replica_manager.pids.values(), setting.cores) as is_held:
                yield Serving(setting, pipeline, known, local, is_held)
