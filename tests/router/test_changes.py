"""Changes of plans and endpoints while requests are in flight."""

import asyncio
import threading
from dataclasses import replace
from functools import partial

import pytest

from tests.builders import a_plan, a_stage, a_variant
from tests.router.fakes import PATIENT, FakeReplica, a_pipeline, a_request, a_rig, endpoints_of, until
from trimtab_pipelines.documents import write_json
from trimtab_router.router import Router
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.watchers.file_watcher import FileWatcher


def two_variants():
    points = [{"accuracy": 0.95}, {"name": "half", "accuracy": 0.8}]
    variants = [a_variant("small"), a_variant("large", accuracy=0.95, operatingPoints=points)]
    return a_pipeline([a_stage("stage-0", variants=variants)])


async def test_plan_tables_are_precomputed_off_the_event_loop():
    prepared, loop_thread = [], threading.get_ident()

    def prepare(points, most_rows):
        assert threading.get_ident() == loop_thread

        def work_out():
            assert threading.get_ident() != loop_thread
            prepared.append(([point.name for point in points], most_rows))

        return work_out

    pipeline, policy = two_variants(), replace(POLICIES["EarliestDeadlineFirst"], prepare=prepare)
    async with a_rig(pipeline, {"stage-0": [FakeReplica()]}, policy=policy, batchSize=4) as rig:
        await rig.until(lambda: prepared == [(["default"], 4)])
        rig.router.apply_plan(a_plan(pipeline, 2, variant="large", batchSize=2, operatingPoint="half"))
        await rig.until(lambda: len(prepared) == 2)

        assert prepared[1] == (["half"], 2)
        await rig.router.drain(1.0)
        rig.router.apply_plan(a_plan(pipeline, 3))
        assert rig.router.plan_generation == 3


async def test_remaining_variants_are_served_during_changes():
    replica = FakeReplica(variants=("small",))
    async with a_rig(two_variants(), {"stage-0": [replica]}) as rig:
        replica.variants = ("small", "large")
        seen = rig.router.state().stages["stage-0"].ready_replicas
        rig.router.apply_endpoints(endpoints_of({"stage-0": [replica]}))
        assert rig.router.state().stages["stage-0"].ready_replicas == seen == 1
        rig.router.apply_plan(a_plan(rig.router.pipeline, 2, variant="large", accuracy=0.95))
        await rig.until(lambda: rig.router.state().stages["stage-0"].variant == "large")

        replica.variants = ("small",)
        rig.router.apply_endpoints(endpoints_of({"stage-0": [replica]}))
        assert rig.router.state().stages["stage-0"].variant == "small"
        assert (await rig.rest(a_request(parameters=PATIENT)))[0] == 200
        assert await rig.outcomes() == {"ok": 1}


async def test_replicas_that_drain_or_go_finish_what_they_hold():
    leaving, staying = FakeReplica(name="leaving"), FakeReplica(name="staying")
    async with a_rig(a_pipeline(1), {"stage-0": [leaving]}) as rig:
        held = await rig.hold(leaving, value=1.0)
        await staying.start()
        both = endpoints_of({"stage-0": [staying]})
        draining = leaving.endpoint(draining=True)
        rig.router.apply_endpoints(both.replace(stages={"stage-0": (*both.stages["stage-0"], draining)}))
        await rig.until(lambda: rig.router.state().stages["stage-0"].endpoints["staying"].ready)
        assert (await rig.rest(a_request(parameters=PATIENT)))[0] == 200
        assert (len(leaving.seen), len(staying.seen)) == (1, 1)

        rig.router.apply_endpoints(both)
        assert list(rig.router.state().stages["stage-0"].endpoints) == ["staying"]
        leaving.gate.set()
        status, answer, _ = await held
        assert (status, answer.outputs[0].array.tolist()) == (200, [[2.0] * 4])
        await staying.stop()


@pytest.fixture
async def watched(tmp_path):
    pipeline = two_variants()
    router = Router(pipeline)
    watcher = FileWatcher(router, tmp_path / "plan.json", tmp_path / "endpoints.json")
    watching = asyncio.create_task(watcher.watch())
    yield router, tmp_path, pipeline
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await router.drain(1.0)


def _broken_plans(router: Router) -> float | None:
    labels = {"namespace": "default", "pipeline": "sample", "file": "plan.json"}
    return router.metrics.registry.get_sample_value("trimtab_invalid_config_total", labels)


def _is_another_broken(router: Router, before: float | None) -> bool:
    return _broken_plans(router) != before


async def test_plan_that_raises_leaves_the_last_one_in_use(tmp_path):
    def prepare(_, most_rows):
        if most_rows == 2:
            raise OverflowError("too large")
        return lambda: None

    pipeline = two_variants()
    router = Router(pipeline, policy=replace(POLICIES["EarliestDeadlineFirst"], prepare=prepare))
    watcher = FileWatcher(router, tmp_path / "plan.json", tmp_path / "endpoints.json")
    write_json(tmp_path / "endpoints.json", endpoints_of({"stage-0": [FakeReplica(port=1)]}))
    for generation in (1, 2):
        write_json(tmp_path / "plan.json", a_plan(pipeline, generation, batchSize=generation))
        watcher.read()
    await router.drain(1.0)

    assert router.state().plan_generation == 1
    assert "replica-0" in router.state().stages["stage-0"].endpoints


async def test_files_are_followed_and_broken_ones_change_nothing(watched):
    router, folder, pipeline = watched
    assert router.state().plan_generation == 0
    write_json(folder / "plan.json", a_plan(pipeline, 3, batchSize=5))
    await until(lambda: router.state().plan_generation == 3)

    for broken in (
        '{"kind": "PipelinePlan", "spec"',
        a_plan(pipeline, 4, variant="huge").model_dump_json(by_alias=True),
    ):
        before = _broken_plans(router)
        (folder / "plan.json").write_text(broken)
        await until(partial(_is_another_broken, router, before))
        state = router.state()
        assert (state.plan_generation, state.stages["stage-0"].batch_size) == (3, 5)

    write_json(folder / "plan.json", a_plan(pipeline, 5, batchSize=6))
    write_json(folder / "endpoints.json", endpoints_of({"stage-0": [FakeReplica(port=1)]}))
    await until(lambda: router.state().plan_generation == 5)
    await until(lambda: "replica-0" in router.state().stages["stage-0"].endpoints)
    assert not router.ready
