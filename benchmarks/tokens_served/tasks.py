"""Tasks registered under load: when they are in force, what others notice, and whether they outlive their replicas."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.modalities.holding import held
from benchmarks.tokens_served.direct import Direct, mixed, split
from benchmarks.tokens_served.driving import STAGE, written
from benchmarks.tokens_served.queries import Queries
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.results import Results
from trimtab_model_servers.transformer.checkpoints import load
from trimtab_model_servers.transformer.task_registry import fingerprint, save_task
from trimtab_pipelines.documents import load_endpoints
from trimtab_pipelines.plan import PipelinePlan, PipelinePlanSpec, initial_stage_plan
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.result_line import Threshold, threshold
from trimtab_pipelines.router_state import TASKS_PATH
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import TaskRecord
from trimtab_protocol.extensions import parse_tasks
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

VARIANT, REPLICAS, CORES, BATCH = "vit-small", 2, 0.8, 8
"""The small one, since it answers so many queries that their p99 can be told; both replicas share these cores."""
OWN, MORE = 4, 4
"""Tasks of the weights, and those that are registered."""
LOAD_SHARE = 0.25
"""Of what both replicas can serve: where queues form, their p99 tells of the queues."""
SETTLING_SECONDS, WINDOW_SECONDS = 4.0, 6.0
"""Before the first task, and of load before and after each."""
POINTS = ("full", "merge-6")
ROUNDS, BATCHES = 9, 12
IDLE_SECONDS = 60.0
Figures = dict[str, float | int | str | None]


@dataclass(slots=True)
class Tasks:
    """The benchmark's phase: what it found, and what holds of it."""

    source: Path
    folder: Path
    queries: Queries
    figures: Figures = field(default_factory=dict)
    bars: list[Threshold] = field(default_factory=list)

    async def run(self) -> None:
        """All of it, on one pipeline that is served throughout."""
        async with (
            served(self.source, self.folder) as (local, key, pipeline),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session,
        ):
            capacity_rps = await self._capacity(local, session)
            await self._registered(local, session, key, pipeline, LOAD_SHARE * REPLICAS * capacity_rps)
            await self._mixed(local, session)
            await self._points(local, session)
            await self._killed(local, session)

    async def _capacity(self, local: Supervisor, session: aiohttp.ClientSession) -> float:
        """Rows a second of one replica, while both share their cores."""
        replicas = self._replicas(local, session)
        rates = await asyncio.gather(*(one.rows_per_second(drawn(1), mixed, POINTS[0], 3.0) for one in replicas))
        return sum(rates) / len(rates)

    async def _registered(
        self, local: Supervisor, session: aiohttp.ClientSession, key: str, pipeline: InferencePipeline, rps: float
    ) -> None:
        """Register under a load that goes on; the seconds after each task against those before it."""
        pids = list(local.replica_manager.pids.values())
        before_bytes = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        seconds = SETTLING_SECONDS + 2 * MORE * WINDOW_SECONDS + 8.0
        options = AttackOptions(duration_seconds=seconds, seed=1, max_payloads=2048)
        address = f"127.0.0.1:{local.rest_port}"
        load_spec = LoadSpec.from_counts(np.full(int(seconds), rps), f"{rps:.0f}/s")
        attack = asyncio.create_task(attack_async(pipeline, address, load_spec, options, source=self.queries))
        calls = await self._register_all(local, session, key)
        self._tell(await attack, calls)
        after_bytes = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        self.figures |= {
            "tasks: load, rps": rps,
            "tasks: memory more, both replicas, MiB": (after_bytes - before_bytes) / 2**20,
        }

    def _tell(self, results: Results, calls: Sequence[tuple[float, float]]) -> None:
        """What the queries around each call say."""
        due, latency = results.records["scheduled"], results.records["latency_seconds"]
        answered = results.records["total"] > 0
        since = [due + results.facts.started_at - at for at, _ in calls]
        busy = answered & np.logical_or.reduce([(each >= 0) & (each < WINDOW_SECONDS) for each in since])
        calm = answered & np.logical_or.reduce([(each < 0) & (each >= -WINDOW_SECONDS) for each in since])
        p99_calm, p99_busy = (1000.0 * float(np.quantile(latency[which], 0.99)) for which in (calm, busy))
        low, high = ratio_interval(latency[busy], latency[calm])
        self.figures |= {
            "tasks: queries": len(due),
            "tasks: not answered": int((~answered).sum()),
            "tasks: queries before": int(calm.sum()),
            "tasks: queries after": int(busy.sum()),
            "tasks: p99 before, ms": p99_calm,
            "tasks: p99 after, ms": p99_busy,
            "tasks: p99 ratio, 95 %": f"{low:.3f}–{high:.3f}",
            "tasks: seconds until in force": ", ".join(f"{one:.3f}" for _, one in calls),
        }
        self.bars += [
            threshold("tasks: seconds until in force on all replicas, most", max(one for _, one in calls), "<=", 2.0),
            threshold("tasks: others' p99 after registering, of before", p99_busy / p99_calm, "<=", 1.05),
        ]

    async def _register_all(
        self, local: Supervisor, session: aiohttp.ClientSession, key: str
    ) -> list[tuple[float, float]]:
        """Register task by task; when, in Unix time, and seconds until all replicas list it, asked at each of them."""
        base = f"http://127.0.0.1:{local.admin_port}{TASKS_PATH}/{STAGE}/{VARIANT}"
        files, replicas = self._files(), self._replicas(local, session)
        taken, statuses = [], []
        await asyncio.sleep(SETTLING_SECONDS)
        for file in files:
            await asyncio.sleep(2 * WINDOW_SECONDS)
            content = await asyncio.to_thread(file.read_bytes)
            async with session.put(f"{base}/{file.stem}", data=content) as answer:
                statuses.append(answer.status)
            called = time.time()
            async with session.put(
                f"{base}/{file.stem}", data=content, headers={"Authorization": f"Bearer {key}"}
            ) as answer:
                answer.raise_for_status()
            told = [parse_tasks(await one.facts()) for one in replicas]
            if not all(file.stem in each for each in told):
                raise RuntimeError(f"said to be in force, but is not: {file.stem}")
            taken.append((called, time.time() - called))
        self.bars.append(threshold("tasks: status without a key, least", min(statuses), "==", 401))
        return taken

    async def _mixed(self, local: Supervisor, session: aiohttp.ClientSession) -> None:
        """One task, eight mixed, eight split, in turns, sixteen rows waiting."""
        replica, tasks = self._replicas(local, session)[0], OWN + MORE
        ways = {"one task": (1, mixed), "eight mixed": (tasks, mixed), "eight split": (tasks, split)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (count, choice) in ways.items():
                found[name].append(await replica.rows_per_second(drawn(count), choice, POINTS[0], 1.0))
        one = np.array(found["one task"])
        for name, rates in found.items():
            self.figures |= {
                f"mixed: {name}, rows/s": float(np.median(rates)),
                f"mixed: {name}, of one task's, least to most": f"{min(rates / one):.3f}–{max(rates / one):.3f}",
            }
        ratio = float(np.median(np.array(found["eight mixed"]) / one))
        self.bars.append(threshold("mixed: eight tasks, of one task's throughput", ratio, ">=", 0.95))

    async def _points(self, local: Supervisor, session: aiohttp.ClientSession) -> None:
        """What a batch takes when the point changes with every one, beyond what it takes when none does."""
        replica = self._replicas(local, session)[0]
        alone: dict[str, list[float]] = {point: [] for point in POINTS}
        turns: dict[str, list[float]] = {point: [] for point in POINTS}
        for _ in range(ROUNDS):
            for point in POINTS:
                alone[point] += (await replica.milliseconds([point], BATCHES))[point]
            for point, taken in (await replica.milliseconds(POINTS, BATCHES)).items():
                turns[point] += taken
        extra = max(float(np.median(turns[point]) - np.median(alone[point])) for point in POINTS)
        for name, found in (("alone", alone), ("in turns", turns)):
            self.figures |= {f"point: {point} {name}, ms": float(np.median(one)) for point, one in found.items()}
        self.bars.append(threshold("point: a change costs, ms beyond the batch", extra, "<=", 1.0))

    async def _killed(self, local: Supervisor, session: aiohttp.ClientSession) -> None:
        """Kill every replica at once; how many tasks those that follow answer."""
        before = set(local.replica_manager.pids.values())
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        give_up = time.monotonic() + IDLE_SECONDS
        while len(set(local.replica_manager.pids.values()) - before) < REPLICAS and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        known = []
        for replica in self._replicas(local, session):
            answer = await replica.infer(range(OWN + MORE), POINTS[0])
            labels = next(one.array for one in answer.outputs if one.name == "label")
            known.append(int((labels >= 0).sum()))
        self.bars.append(threshold("tasks: answered by replicas after all had died", min(known), "==", OWN + MORE))

    def _replicas(self, local: Supervisor, session: aiohttp.ClientSession) -> list[Direct]:
        listed = load_endpoints(local.replica_manager.site.endpoints_file).stages[STAGE]
        images = np.concatenate([self.queries.payload(index).inputs[0].array for index in range(BATCH)])
        return [Direct(session, f"http://{one.address}/v2/models/{VARIANT}", images) for one in listed]

    def _files(self) -> list[Path]:
        """Tasks with the heads of the weights' own under other names."""
        stored = load(self.source / "weights" / "vit-tasks.safetensors")
        mark, made = fingerprint(stored.transformer), []
        for name, classes in list(stored.tasks.items())[:MORE]:
            made.append(self.folder / "made" / f"more-{name}.safetensors")
            card = TaskRecord(classes=classes, transformer=mark)
            save_task(made[-1], card, {way: by_task[name] for way, by_task in stored.heads.items()})
        return made


def drawn(tasks: int) -> Iterator[int]:
    """Task after task, drawn from so many."""
    random_ = random.Random(1)  # noqa: S311
    while True:
        yield random_.randrange(tasks)


def ratio_interval(one: NDArray[np.float64], other: NDArray[np.float64], resamples: int = 400) -> tuple[float, float]:
    """95 % of the ratio of two p99s over queries drawn again (bootstrap)."""
    rng = np.random.default_rng(0)
    ratios = [
        np.quantile(rng.choice(one, one.size), 0.99) / np.quantile(rng.choice(other, other.size), 0.99)
        for _ in range(resamples)
    ]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


@asynccontextmanager
async def served(source: Path, folder: Path) -> AsyncIterator[tuple[Supervisor, str, InferencePipeline]]:
    """Two replicas of the small transformer, held to their cores, and a key that registers."""
    pipeline, key = written(source, folder, "EarliestDeadlineFirst", 2.0), new_key()
    (folder / "keys").write_text(f"bench: {format_entry(HashedKey('bench', key_digest(key)))}\n")
    stage = initial_stage_plan(pipeline.spec.stage(STAGE)).model_copy(
        update={
            "replicas": REPLICAS,
            "batch_size": BATCH,
            "cores": pipeline.spec.stage(STAGE).variant(VARIANT).resources.cpu,
        }
    )
    spec = PipelinePlanSpec(pipeline=pipeline.name, generation=1, created_at=0.0, stages=(stage,))
    plan = PipelinePlan(metadata=Metadata(name=pipeline.name), spec=spec)
    setup = Setup(folder / "pipeline.yaml", folder / "run", plan=plan, admin_keys=folder / "keys")
    async with Supervisor(setup) as local:
        await local.ready()
        with held(local.replica_manager.pids.values(), CORES):
            yield local, key, pipeline
