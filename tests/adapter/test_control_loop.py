"""The loop against a router that works, goes away, comes back and lies; and against kill -9."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from watchfiles import awatch

from tests.adapter.scenes import FakeRouter, a_ladder, profiles_of
from trimtab_adapter.__main__ import main
from trimtab_adapter.control_loop import REST_FACTOR, ControlLoop, LoadSources
from trimtab_adapter.files import FileConfigSource, FilePlanPublisher
from trimtab_adapter.load_sources import RouterSource
from trimtab_adapter.planning.decide import decide
from trimtab_pipelines.documents import dump_yaml, load_plan
from trimtab_predictor.forecaster import ReactiveForecaster
from trimtab_predictor.metrics_client import open_session


@dataclass
class Site:
    """A run folder, a fake router and the loop between them."""

    folder: Path
    router: FakeRouter
    client: aiohttp.ClientSession

    def loop(self, forecaster=None, sources=None) -> ControlLoop:
        source = RouterSource(self.client, self.router.url)
        publisher = FilePlanPublisher(self.folder / "plan.json", self.folder / "decisions.jsonl")
        documents = FileConfigSource(self.folder / "pipeline.yaml", self.folder / "profile.yaml")
        return ControlLoop(
            documents, publisher, sources or LoadSources(source, source), forecaster or ReactiveForecaster()
        )

    def plan(self):
        return load_plan(self.folder / "plan.json").spec

    def decisions(self) -> list[dict[str, Any]]:
        return [json.loads(line)["spec"] for line in (self.folder / "decisions.jsonl").read_text().splitlines()]

    def write(self, **changes) -> None:
        write_documents(self.folder, **changes)


def write_documents(folder: Path, **changes) -> None:
    pipeline = a_ladder(**changes)
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
    (folder / "profile.yaml").write_text(dump_yaml(*profiles_of(pipeline).values()))


class Attentive(ReactiveForecaster):
    """Notes how many seconds of history it is given, and that it was asked."""

    def __init__(self, asked: asyncio.Event) -> None:
        super().__init__()
        self.asked = asked
        self.lengths: list[int] = []

    def forecast(self, history_rps, now_seconds):
        self.lengths.append(len(history_rps))
        self.asked.set()
        return super().forecast(history_rps, now_seconds)


@pytest.fixture
async def site(tmp_path):
    write_documents(tmp_path)
    async with FakeRouter().serve() as router, open_session(2.0) as client:
        yield Site(tmp_path, router, client)


async def test_load_changes_the_plan_and_every_decision_is_journalled(site):
    loop = site.loop()
    for n, rps in enumerate((5.0, 5.0, 400.0, 5.0)):
        site.router.offer(rps)
        await loop.tick(1000.0 + 100 * n)

    assert [spec["generation"] for spec in site.decisions()] == [1, 1, 2, 3]
    assert site.plan().generation == 3
    assert site.plan().forecast.observed_rps == 5.0
    assert site.plan().forecast.source == "reactive"
    assert site.plan().explanation.solve_seconds > 0


async def test_a_restarted_adapter_goes_on_from_the_plan_in_force(site):
    first = site.loop()
    site.router.offer(400.0)
    await first.tick(1000.0)
    second = site.loop()
    site.router.offer(5.0)
    await second.tick(1005.0)  # within the hold: the peak before the restart still counts
    assert site.plan().generation == 1
    await second.tick(1100.0)

    assert site.plan().generation == 2
    assert [spec["generation"] for spec in site.decisions()] == [1, 1, 2]


async def test_hours_are_requested_at_start_and_after_a_gap(site):
    forecaster = Attentive(asyncio.Event())
    site.router.load = {"now": 1000.0, "rps": [5.0] * 5000}
    site.router.status = 503
    loop = site.loop(forecaster)
    await loop.tick(1000.0)
    site.router.status = 200
    for now in (1010.0, 1020.0, 1619.0, 2219.0, 2229.0, 2000.0):
        await loop.tick(now)

    assert forecaster.lengths == [5000, 600, 600, 5000, 600, 5000]


async def test_paused_pipeline_does_not_consume_the_first_history(site):
    forecaster = Attentive(asyncio.Event())
    site.router.load = {"now": 1000.0, "rps": [5.0] * 5000}
    loop = site.loop(forecaster)
    site.write(mode="Paused")
    await loop.tick(1000.0)
    site.write(mode="Auto")
    await loop.tick(1010.0)

    assert forecaster.lengths == [5000]


async def test_router_outage_costs_only_its_ticks(site, caplog):
    loop = site.loop()
    await loop.tick(1000.0)
    before = site.plan()
    site.router.status = 503
    await loop.tick(1010.0)
    held = site.decisions()[-1]

    assert site.plan() == before
    assert held["generation"] == 1
    assert held["explanation"]["change"] == (
        f"held: {site.router.url}/trimtab/v1/arrivals returned 503: the router is not well"
    )
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"sample: plan 1 held: {site.router.url}/trimtab/v1/arrivals returned 503: the router is not well"
    ]
    site.router.status = 200
    site.router.offer(400.0)
    await loop.tick(1020.0)
    assert site.plan().generation == 2


async def test_absurd_state_leaves_the_measurements_as_they_were(site, caplog):
    loop = site.loop()
    site.router.state = {"stages": {"stage-0": {"rows_per_request": "many"}}}
    await loop.tick(1000.0)

    assert site.plan().generation == 1
    assert "state.stages.stage-0.rows_per_request is 'many'; expected a finite number" in caplog.text


async def test_modes_advisory_only_journals_and_paused_does_nothing(site):
    site.write(mode="Advisory")
    await site.loop().tick(1000.0)
    assert not (site.folder / "plan.json").exists()
    assert len(site.decisions()) == 1
    site.write(mode="Paused")
    await site.loop().tick(1010.0)
    assert len(site.decisions()) == 1


async def test_only_a_valid_edit_applies_at_the_next_tick(site, caplog):
    loop = site.loop()
    await loop.tick(1000.0)
    (site.folder / "pipeline.yaml").write_text("spec: [")
    await loop.tick(1010.0)
    assert "not YAML" in caplog.text
    assert "the last valid pipeline and profiles stay in use" in caplog.text
    site.write(slo={"latency": "30ms"})
    await loop.tick(1020.0)

    # The stages are alike: either may be the lighter one.
    assert sorted(stage.variant for stage in site.plan().stages) == ["light", "middle"]


async def test_a_broken_plan_file_is_reported_and_replaced(site, caplog):
    (site.folder / "plan.json").write_text('{"kind": "PipelinePlan"')
    loop = site.loop()
    await loop.tick(1000.0)

    assert "starting from a first plan" in caplog.text
    assert site.plan().generation == 1


async def test_run_writes_a_first_plan_ticks_and_stops_on_event(site):
    site.write(adaptation={"interval": "1s"})
    site.router.status = 503
    loop, stop = site.loop(), asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    async with asyncio.timeout(10):
        for _ in range(3):
            await site.router.asked.acquire()
        stop.set()
        await running

    assert site.decisions()[0]["forecast"]["source"] == "initial"
    assert site.plan().generation == 1


async def test_defect_in_the_first_plan_ends_no_loop(site):
    site.write(adaptation={"interval": "1s"})
    loop, stop = site.loop(), asyncio.Event()
    planner = loop.controller.planner

    def fail_once(*inputs):
        loop.controller.planner = planner
        raise OverflowError("too large")

    loop.controller.planner = fail_once
    running = asyncio.create_task(loop.run(stop))
    async with asyncio.timeout(10):
        await site.router.asked.acquire()
        stop.set()
        await running

    assert site.plan().generation == 1


async def test_killed_adapter_leaves_a_whole_plan_and_continues(site):
    """Kill -9, three times, while the plan is rewritten as often as may be."""
    site.write(adaptation={"interval": "1s", "scaleDownStabilization": "0s", "switchingCost": 0})
    command = [sys.executable, "-m", "trimtab_adapter", "--pipeline", site.folder, "--profiles", site.folder]
    command += ["--plan", site.folder / "plan.json", "--decisions", site.folder / "decisions.jsonl"]
    generations = [0]
    for _ in range(3):
        process = await asyncio.create_subprocess_exec(
            *command, "--router", site.router.url, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(30):
                written = 0
                while written < 3 + generations[-1]:
                    site.router.offer(500.0 if written % 2 else 5.0)
                    await site.router.asked.acquire()
                    with contextlib.suppress(Exception):
                        written = site.plan().generation
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        generations.append(site.plan().generation)

    assert generations == sorted(set(generations))


def test_the_command_line_names_what_it_cannot_use(tmp_path, capsys):
    paths = ["--plan", str(tmp_path / "p"), "--decisions", str(tmp_path / "d")]
    missing = ["--pipeline", str(tmp_path / "none.yaml"), "--profiles", str(tmp_path)]

    assert main([*missing, *paths, "--router", "http://127.0.0.1:9"]) == 2
    assert "none.yaml: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*missing, *paths])
    assert "give --router, --prometheus or both" in capsys.readouterr().err


def test_a_signal_ends_it_cleanly(tmp_path):
    write_documents(tmp_path)
    command = [sys.executable, "-m", "trimtab_adapter", "--pipeline", tmp_path, "--profiles", tmp_path]
    command += ["--plan", tmp_path / "plan.json", "--decisions", tmp_path / "d.jsonl", "--router", "http://127.0.0.1:9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "plan 1: first plan" in process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=20) == 0


async def test_a_load_that_outgrows_the_plan_is_not_waited_out(site):
    site.write(adaptation={"interval": "1h"})
    loop, stop = site.loop(), asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
    await site.router.asked.acquire()
    site.router.offer(300.0)
    async for changes in awatch(site.folder, stop_event=stop):
        if any(Path(path).name == "plan.json" for _, path in changes) and site.plan().forecast.peak_rps >= 300.0:
            stop.set()
    await running

    assert site.plan().generation == 2


async def test_long_decision_is_followed_by_an_uninterrupted_rest(site):
    """A pipeline with long decisions leaves the solvers to other pipelines in between, despite wake-ups."""
    site.write(adaptation={"interval": "1s"})
    site.router.offer(5.0)
    loop, stop, decided = site.loop(), asyncio.Event(), []

    def laborious(*asked):
        began, computing = time.monotonic(), time.thread_time()
        while time.thread_time() - computing < 0.1:
            pass
        decided.append((began, time.monotonic(), time.thread_time() - computing))
        loop.wake()
        if len(decided) == 4:
            stop.set()
        return decide(*asked)

    loop.controller.planner = laborious
    async with asyncio.timeout(60):
        await loop.run(stop)

    pairs = itertools.pairwise(decided)
    assert all(second[0] - first[1] >= REST_FACTOR * first[2] for first, second in pairs)


async def test_whatever_goes_wrong_with_a_look_ends_no_loop(site, caplog):
    class Odd(RouterSource):
        looks = asyncio.Semaphore(0)

        async def load(self, now_seconds, seconds=0):  # noqa: ARG002 - the shared signature
            self.looks.release()
            raise RecursionError("too deep")

    site.write(adaptation={"interval": "1h"})
    good, odd = RouterSource(site.client, site.router.url), Odd(site.client, site.router.url)
    loop, stop = site.loop(sources=LoadSources(good, odd, lambda: 0.01)), asyncio.Event()
    site.router.offer(5.0)
    await loop.tick(1000.0)
    running = asyncio.create_task(loop.run(stop))
    for _ in range(3):
        await asyncio.wait_for(odd.looks.acquire(), 20.0)
    assert not running.done()
    assert "the newest second cannot be read" in caplog.text
    stop.set()
    await running


async def test_usage_outside_auto_mode_is_recorded_without_routers(site):
    loop, noted = site.loop(), []
    loop.record_usage = lambda pipeline, plan: noted.append((pipeline.spec.mode, plan))
    site.router.offer(5.0)
    await loop.tick(1000.0)
    assert noted == []
    in_force, site.router.status = loop.current, 503
    for mode in ("Advisory", "Paused"):
        site.write(mode=mode)
        await loop.tick(1100.0)

    assert noted == [("Advisory", in_force), ("Paused", in_force)]
