"""The adapter in a cluster: a real process against a real API server, with routers of real HTTP."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial, reduce

import httpx

from tests.adapter.clusters import SECONDS, Adapter, a_pipeline_of, an_adapter, condition, put, routed, seen
from tests.adapter.scenes import FakeRouter, profiles_of
from tests.builders import a_body
from tests.tcp_relay import before_the_api_server
from trimtab_adapter.cluster.pipeline_loops import LoopDependencies, PipelineLoops
from trimtab_adapter.controller import Tick
from trimtab_adapter.forecasting import TrainedWeights
from trimtab_adapter.metrics import AdapterMetrics
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.latency import busiest_rps
from trimtab_kubernetes import list_and_watch
from trimtab_kubernetes.objects import Key, Object
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER, ADVISORY_LABEL, advisory_name
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.metrics_client import open_session

PLAN, PIPELINE = "PipelinePlan", "InferencePipeline"


def having(path: Sequence[str], value: object) -> Callable[[Object], bool]:
    """Whether a field of an object has a value."""
    return lambda found: reduce(lambda part, name: part.get(name, {}), path, found) == value


generation = partial(having, ("spec", "generation"))
forecasting = partial(having, ("status", "forecastRps"))
held_by = partial(having, ("spec", "holderIdentity"))


def planned_for_rise(rps: float) -> Callable[[Object], bool]:
    """Whether a plan is for the busiest second of a load that rose to a rate; the horizon is the default's."""
    return having(("spec", "forecast", "peakRps"), busiest_rps(rps, Adaptation().horizon_seconds))


def owned_by(uid: str):
    return lambda plan: uid in {owner["uid"] for owner in plan["metadata"]["ownerReferences"]}


def is_from_the_adapter(event) -> bool:
    """The API server writes events too, about the address of a Service for example."""
    return bool(event.get("reportingComponent") == ADAPTER_MANAGER)


async def wait_for_events(cluster, namespace: str, events: int) -> None:
    """Wait for so many events of the adapter, which it writes after the status."""
    names: set[str] = set()
    async with asyncio.timeout(SECONDS):
        async for change in list_and_watch(cluster, "Event", namespace):
            if change.object is not None and is_from_the_adapter(change.object):
                names.add(change.key[1])
            if len(names) >= events:
                return


def variants(plan) -> list[str]:
    return [stage["variant"] for stage in plan["spec"]["stages"]]


async def test_a_pipeline_is_planned_watched_and_reported(cluster, namespace, kubeconfig):
    await put(cluster, a_pipeline_of(namespace))
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace) as adapter:
        first = await seen(cluster, PLAN, namespace, "sample", lambda _: True)
        served = {"received": 60, "ok": 59, "late": 1, "p99_seconds": 0.1234, "accuracy": 0.64321}
        router.state = {"plan_generation": 1, "stages": {}, "served": served}
        router.offer(400.0)
        await routed(cluster, namespace, "sample", router)
        await seen(cluster, PLAN, namespace, "sample", generation(2))
        found = await seen(cluster, PIPELINE, namespace, "sample", forecasting("440"))
        async with httpx.AsyncClient() as client:
            healthy = await client.get(adapter.health)
            metrics = (await client.get(adapter.metrics)).text
        await wait_for_events(cluster, namespace, 2)
        events = [event for event in (await cluster.list("Event", namespace)).items if is_from_the_adapter(event)]

    status = found["status"]
    assert first["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    assert {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]} == {
        "MetricsAvailable": ("True", "Fresh"),
        "ForecastReady": ("True", "Reactive"),
        "OptimizationReady": ("True", "Optimal"),
    }
    assert (status["rps"], status["accuracy"], status["p99"]) == ("400", "0.643", "120ms")
    assert [one["generation"] for one in status["history"]] == [2, 1]
    assert "stages" not in status
    assert healthy.status_code == 200
    assert f'trimtab_planned_generation{{namespace="{namespace}",pipeline="sample"}} 2.0' in metrics
    assert sorted(event["message"].partition(":")[0] for event in events) == ["Plan 1", "Plan 2"]
    assert {event["involvedObject"]["uid"] for event in events} == {found["metadata"]["uid"]}


async def test_what_users_do_to_plans(cluster, namespace, kubeconfig):
    """A broken plan is replaced, a missing one is written again, from a good one it continues; no pipeline, no loop."""
    await put(cluster, a_pipeline_of(namespace))
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace) as adapter:
        await routed(cluster, namespace, "sample", router)
        plan = await seen(cluster, PLAN, namespace, "sample", lambda _: True)
        mine = {key: plan[key] for key in ("apiVersion", "kind", "spec")}
        mine["metadata"] = {"name": "sample", "namespace": namespace}

        await seen(cluster, PLAN, namespace, "sample", planned_for_rise(5))
        broken = {**mine, "spec": {**mine["spec"], "stages": [{**mine["spec"]["stages"][0], "variant": "nothing"}]}}
        await cluster.apply(broken, manager="user")
        mended = await seen(cluster, PLAN, namespace, "sample", lambda p: "nothing" not in variants(p))
        assert len(variants(mended)) == 2

        await cluster.delete(PLAN, namespace, "sample")
        await seen(cluster, PLAN, namespace, "sample", lambda p: p["metadata"]["uid"] != mended["metadata"]["uid"])

        by_hand = {**mine, "spec": {**mine["spec"], "generation": 41}}
        await cluster.apply(by_hand, manager="user")
        await wait_for_metrics(adapter, router, lambda metrics: planned_generation(metrics) >= 41)
        router.offer(400.0)
        changed = await seen(cluster, PLAN, namespace, "sample", planned_for_rise(400))
        assert changed["spec"]["generation"] >= 42

        await cluster.delete(PIPELINE, namespace, "sample")
        await put(cluster, a_pipeline_of(namespace))
        anew = await cluster.get(PIPELINE, namespace, "sample")
        assert anew is not None
        await seen(cluster, PLAN, namespace, "sample", owned_by(anew["metadata"]["uid"]))
        await seen(cluster, PIPELINE, namespace, "sample", forecasting("440"))

        await cluster.delete(PIPELINE, namespace, "sample")
        async with httpx.AsyncClient() as client, asyncio.timeout(20):
            while "sample" in (await client.get(adapter.metrics)).text:
                pass  # each turn waits for an answer


async def test_advice_is_given_beside_the_plan_and_taken_back(cluster, namespace, kubeconfig):
    name = advisory_name("sample")
    await put(cluster, a_pipeline_of(namespace, mode="Advisory"))
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace):
        await routed(cluster, namespace, "sample", router)
        advice = await seen(cluster, PLAN, namespace, name, lambda _: True)
        assert ADVISORY_LABEL in advice["metadata"]["labels"]
        advised = await seen(cluster, PIPELINE, namespace, "sample", planned_as("Advisory"))
        assert "history" not in advised["status"] or advised["status"]["history"] == []
        assert await cluster.get(PLAN, namespace, "sample") is None
        await cluster.apply(a_body(a_pipeline_of(namespace, mode="Auto")), manager="user")
        await seen(cluster, PLAN, namespace, "sample", lambda _: True)
        async with asyncio.timeout(20):
            while await cluster.get(PLAN, namespace, name) is not None:
                await router.asked.acquire()


async def test_advice_does_not_overwrite_a_foreign_plan(cluster, namespace, kubeconfig):
    pipeline = a_pipeline_of(namespace, mode="Advisory")
    await put(cluster, pipeline)
    body = a_body(initial_plan(pipeline, profiles_of(pipeline)), advisory_name("sample"), namespace)
    before = await cluster.apply(body, manager="another-manager")
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace):
        await routed(cluster, namespace, "sample", router)
        await seen(cluster, PIPELINE, namespace, "sample", planned_as("Advisory"))
    assert await cluster.get(PLAN, namespace, advisory_name("sample")) == before


async def test_paused_and_unprofiled_pipelines_are_reported(cluster, namespace, kubeconfig):
    await put(cluster, a_pipeline_of(namespace, "paused", mode="Paused"))
    await put(cluster, a_pipeline_of(namespace, "new"), profiled=False)
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace):
        for name in ("paused", "new"):
            await routed(cluster, namespace, name, router)
        await seen(cluster, PIPELINE, namespace, "paused", planned_as("Paused"))
        new = await seen(cluster, PIPELINE, namespace, "new", planned_as("PlanningError"))
        assert "has no profile" in condition(new, "OptimizationReady")["message"]
        assert await cluster.get(PLAN, namespace, "paused") is None
        await put(cluster, a_pipeline_of(namespace, "new"))
        await seen(cluster, PLAN, namespace, "new", generation(1))


async def test_paused_pipeline_keeps_its_handwritten_pool_allocation(cluster, namespace, kubeconfig, tmp_path):
    (tmp_path / "pools.yaml").write_text("pools: {shared: {cores: 4}}")
    budget = {"cores": "4", "pool": "shared"}
    paused = a_pipeline_of(namespace, "paused", mode="Paused", budget=budget)
    hand = a_body(initial_plan(paused, profiles_of(paused)), namespace=namespace)
    await put(cluster, paused)
    busy = FakeRouter()
    busy.offer(1500.0)
    async with (
        FakeRouter().serve(host="0.0.0.0") as calm,
        busy.serve(host="0.0.0.0"),
        an_adapter(kubeconfig, namespace, "--pools", str(tmp_path / "pools.yaml")),
    ):
        await routed(cluster, namespace, "paused", calm)
        await seen(cluster, PIPELINE, namespace, "paused", planned_as("Paused"))
        await put(cluster, a_pipeline_of(namespace, "auto", budget=budget))
        await routed(cluster, namespace, "auto", busy)
        await seen(cluster, PLAN, namespace, "auto", lambda plan: plan["spec"]["expected"]["cores"] == 4.0)
        await cluster.apply(hand, manager="user")
        await seen(cluster, PLAN, namespace, "auto", lambda plan: plan["spec"]["expected"]["cores"] == 2.0)


class Faulty(AdapterMetrics):
    """Metrics that fail at the first tick, and tell of every one."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks, self.taken = asyncio.Semaphore(0), 0

    def take(self, key: Key, tick: Tick) -> None:
        super().take(key, tick)
        self.ticks.release()
        self.taken += 1
        if self.taken == 1:
            raise RuntimeError("as no tick expects")


async def test_a_loop_that_a_fault_ended_is_started_again(cluster, namespace, caplog):
    await put(cluster, a_pipeline_of(namespace))
    faulty = Faulty()
    async with open_session(2.0) as routers:
        loops = PipelineLoops(LoopDependencies(cluster, routers, None, TrainedWeights(None), faulty), [namespace])
        running = asyncio.create_task(loops.run())
        for _ in range(3):
            await asyncio.wait_for(faulty.ticks.acquire(), SECONDS)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert f"{namespace}/sample: control loop failed" in caplog.text


async def test_it_plans_within_what_found_room(cluster, namespace, kubeconfig):
    pipeline = a_pipeline_of(namespace)
    await put(cluster, pipeline)
    async with FakeRouter().serve(host="0.0.0.0") as router, an_adapter(kubeconfig, namespace):
        router.offer(150.0)
        await routed(cluster, namespace, "sample", router)
        whole = await seen(cluster, PLAN, namespace, "sample", planned_for_rise(150))
        room = {"cores": "2", "since": "2026-01-01T00:00:00Z"}
        status = {k: v for k, v in a_body(pipeline).items() if k != "spec"} | {"status": {"schedulable": room}}
        await cluster.apply(status, manager="trimtab-operator", subresource="status")
        within = await seen(cluster, PLAN, namespace, "sample", lambda p: p["spec"]["expected"]["cores"] <= 2)

    assert whole["spec"]["expected"]["cores"] > 2
    change = within["spec"]["explanation"]["change"]
    assert change.endswith("the nodes can schedule 2 cores of the budget's 4 cores")


async def test_one_of_two_adapters_plans_and_the_other_takes_over(cluster, namespace, kubeconfig):
    await put(cluster, a_pipeline_of(namespace))
    async with FakeRouter().serve(host="0.0.0.0") as router:
        await routed(cluster, namespace, "sample", router)
        async with an_adapter(kubeconfig, namespace, name="first"):
            await seen(cluster, "Lease", namespace, "trimtab-adapter", held_by("first"))
            async with an_adapter(kubeconfig, namespace, name="second") as second:
                await seen(cluster, PLAN, namespace, "sample", lambda _: True)
                async with httpx.AsyncClient() as client:
                    assert (await client.get(second.health)).status_code == 200
                    assert "trimtab_planned_generation{" not in (await client.get(second.metrics)).text
        async with an_adapter(kubeconfig, namespace, name="third"):
            router.offer(400.0)
            await seen(cluster, "Lease", namespace, "trimtab-adapter", held_by("third"))
            await seen(cluster, PLAN, namespace, "sample", planned_for_rise(400))


def planned_generation(metrics: str) -> float:
    return float(re.findall(r"^trimtab_planned_generation\{.*\} (\S+)$", metrics, re.MULTILINE)[0])


async def wait_for_metrics(adapter: Adapter, router: FakeRouter, is_so: Callable[[str], bool]) -> None:
    """Wait for metrics of the adapter that satisfy a predicate; checks after each request to the router."""
    async with httpx.AsyncClient() as client, asyncio.timeout(30):
        while not is_so((await client.get(adapter.metrics)).text):
            await router.asked.acquire()


def planned_as(reason: str):
    return lambda pipeline: condition(pipeline, "OptimizationReady").get("reason") == reason


async def test_adapter_runs_through_an_api_server_outage(cluster, namespace, kubeconfig, tmp_path):
    await put(cluster, a_pipeline_of(namespace))
    async with (
        before_the_api_server(kubeconfig, tmp_path) as (relay, through),
        FakeRouter().serve(host="0.0.0.0") as router,
    ):
        await relay.open()
        await routed(cluster, namespace, "sample", router)
        async with an_adapter(through, namespace) as adapter, httpx.AsyncClient() as client:
            before = await seen(cluster, PLAN, namespace, "sample", planned_for_rise(5))
            await relay.close()
            router.offer(400.0)
            await wait_for_metrics(adapter, router, lambda metrics: planned_generation(metrics) == 2.0)
            assert (await client.get(adapter.health)).status_code == 200
            still = await cluster.get(PLAN, namespace, "sample")
            assert still is not None
            assert still["spec"]["generation"] == before["spec"]["generation"]
            await relay.open()
            after = await seen(cluster, PLAN, namespace, "sample", planned_for_rise(400))
            assert after["spec"]["generation"] == before["spec"]["generation"] + 1
            found = await seen(cluster, PIPELINE, namespace, "sample", forecasting("440"))
            assert found["status"]["history"][0]["generation"] == after["spec"]["generation"]
