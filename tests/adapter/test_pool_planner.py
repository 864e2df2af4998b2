"""Pipelines of one pool that decide one after the other: never above the pool, in the end as if planned together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest

from tests.adapter.scenes import a_ladder, expected, plan_together, profiles_of
from tests.builders import a_plan
from trimtab_adapter.cluster.pipeline_loops import SolverPool
from trimtab_adapter.planning.decide import PlanningInputs, initial_inputs
from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_adapter.planning.pool_allocation import PlanRequest
from trimtab_adapter.planning.pool_planner import PoolPlanner, held_resources, plan_resources
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import Pool

POOL = Pool(cores=8.0)


class Table:
    """Pipelines at one pool; `tick` is what a loop does, woken ones tick in turn."""

    def __init__(self, *names, budget="16", pool="shared", cores=POOL.cores, namespaces=()):
        self.pool = Pool(cores=cores, namespaces=namespaces)
        self.pools = PoolPlanner({"shared": self.pool})
        self.pipeline = a_ladder(budget={"cores": budget, "pool": pool}, objective={"accuracyWeight": 40})
        self.profiles = profiles_of(self.pipeline)
        self.loads, self.plans, self.advice, self.now = {}, {}, {}, 0.0
        self.woken: list[str] = []
        self.planners = {
            name: self.pools.planner(name, self.pipeline, None, partial(self.woken.append, name)) for name in names
        }

    def planning_inputs(self, name):
        forecast = ForecastRecord(peak_rps=self.loads[name], source="given")
        return PlanningInputs(forecast, self.now, self.plans.get(name))

    def tick(self, name, load_rps, *, wait=False, mode="Auto"):
        self.now += 100.0
        self.loads[name] = load_rps
        pipeline = self.pipeline.with_spec(mode=mode)
        if mode != "Auto":
            self.pools.record_usage(name, partial(self.woken.append, name), pipeline, self.plans.get(name))
        if mode != "Paused":
            with suppress(PlanningError) if wait else nullcontext():
                decided = self.plans if mode == "Auto" else self.advice
                decided[name] = self.planners[name](pipeline, self.profiles, self.planning_inputs(name))
        assert self.cores() <= self.pool.cores + 1e-9

    def settle(self):
        for _ in range(20):
            if not self.woken:
                return
            name = self.woken.pop(0)
            if name in self.loads:
                self.tick(name, self.loads[name], wait=True)
        raise AssertionError("they wake each other without end")

    def cores(self):
        return sum(plan_resources(plan, self.pipeline)[0] for plan in self.plans.values())


def paused(pipeline):
    return pipeline.with_spec(mode="Paused")


def test_any_order_of_loads_keeps_the_pool_and_settles():
    rng, table = np.random.default_rng(3), Table("a", "b", "c")
    for _ in range(25):
        table.tick(str(rng.choice(["a", "b", "c"])), float(rng.choice([5.0, 80.0, 250.0])), wait=True)
        table.settle()
    assert set(table.plans) == {"a", "b", "c"}


def test_once_settled_it_is_the_joint_plan():
    table = Table("one", "other")
    for name, load in (("one", 250.0), ("other", 60.0)):
        table.tick(name, load)
    table.settle()
    members = {name: PlanRequest(table.pipeline, table.profiles, table.planning_inputs(name)) for name in table.plans}
    joint = plan_together("shared", POOL, members)

    assert {n: expected(p).cores for n, p in joint.items()} == {n: expected(p).cores for n, p in table.plans.items()}


def test_a_pipeline_that_does_not_decide_keeps_what_it_holds():
    table = Table("one")
    table.tick("one", 300.0)
    alone = expected(table.plans["one"]).cores
    other = PoolPlanner({"shared": POOL})
    held = table.plans["one"]
    other.planner("paused", table.pipeline, held, lambda: None)
    planner = other.planner("two", table.pipeline, None, lambda: None)
    plan = planner(table.pipeline, table.profiles, initial_inputs(300.0))

    assert expected(plan).cores <= POOL.cores - alone
    other.remove("paused")
    later = planner(table.pipeline, table.profiles, initial_inputs(300.0))
    assert expected(later).cores == alone


def test_what_a_user_puts_into_force_by_hand_is_held_in_the_pool():
    table = Table("hand", "auto")
    table.tick("hand", 300.0, mode="Advisory")
    assert table.plans == {}, "advice is not in force"
    by_hand = a_plan(table.pipeline, variant="light", replicas=3)
    for mode in ("Advisory", "Paused"):
        table.plans["hand"] = by_hand
        table.tick("hand", 300.0, mode=mode)
        table.tick("auto", 300.0)  # which checks the pool
        table.settle()
        assert table.cores() - expected(table.plans["auto"]).cores == 6.0
        table.plans["hand"] = a_plan(table.pipeline, variant="light", replicas=1)
        table.tick("hand", 300.0, mode=mode)
        assert table.woken == ["auto"], "released cores wake the other pipelines"
        table.settle()
        assert expected(table.plans["auto"]).cores > 2.0
        table.plans.pop("auto")
        table.pools.remove("auto")


def test_handwritten_plan_allocates_its_replicas():
    resources = {"resources": {"cpu": "2", "gpu": 1}}
    pipeline = a_ladder(variant=resources, budget={"cores": "16", "gpus": 8})
    plan = a_plan(pipeline, variant="light", replicas=3, cores="1000")
    assert plan_resources(plan, pipeline) == (12.0, 6), "by the variants' own requests, whatever the plan says"
    assert plan_resources(plan, a_ladder(variant=resources, budget={"cores": "8", "gpus": 5})) == (8.0, 5)


@pytest.mark.parametrize("mode", ["Paused", "Advisory", "Auto"])
@pytest.mark.parametrize(
    ("replicas", "status", "held"),
    [
        (1000, None, 16.0),  # no more than the budget
        (3, None, 6.0),
        (1000, {"cores": "2"}, 2.0),  # what runs
        (1000, {"cores": "0"}, 0.0),
        (3, {"cores": "900"}, 6.0),
        (3, {"cores": "many"}, 6.0),
        (None, {"cores": "3"}, 3.0),  # replicas of a plan that is refused or gone
        (None, None, 0.0),
    ],
)
def test_written_plan_holds_no_more_than_what_runs(mode, replicas, status, held):
    pipeline = a_ladder(budget={"cores": "16", "pool": "shared"}, mode=mode).replace(status=status)
    plan = None if replicas is None else a_plan(pipeline, variant="light", replicas=replicas, cores="1000")

    assert held_resources(plan, pipeline) == (held, 0)


def test_written_plan_takes_no_pool():
    table = Table("mallory", "bob")
    table.pipeline = table.pipeline.replace(status={"cores": "2"})
    huge = a_plan(table.pipeline, variant="light", replicas=1000, cores="1000")
    table.pools.record_usage("mallory", lambda: None, paused(table.pipeline), huge)
    table.loads["bob"] = 300.0
    alone = table.planners["bob"](table.pipeline, table.profiles, table.planning_inputs("bob"))

    assert 2.0 < expected(alone).cores <= POOL.cores - 2.0


def test_running_gpus_are_those_of_the_operators_stages():
    pipeline = a_ladder(variant={"resources": {"cpu": "2", "gpu": 1}}, budget={"cores": "16", "gpus": 8})
    stages = [{"name": f"stage-{number}", "variant": "light", "replicas": 1 + number} for number in range(2)]
    running = pipeline.replace(status={"cores": "6", "stages": stages})

    assert held_resources(a_plan(pipeline, variant="light", replicas=4), running) == (6.0, 3)


def test_advice_takes_nothing_from_the_neighbours():
    table = Table("auto", "advised")
    table.tick("auto", 60.0)
    before = table.plans["auto"]
    table.tick("advised", 1200.0, mode="Advisory")
    assert table.woken == []
    assert expected(table.advice["advised"]).cores <= POOL.cores
    table.tick("auto", 60.0)
    assert expected(table.plans["auto"]) == expected(before)
    table.tick("advised", 1200.0)
    assert table.woken == ["auto"], "in Auto it asks for its part"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "elsewhere"}, "'elsewhere' is not in the file of pools; pools: shared"),
        ({"namespaces": ("a", "b")}, "'shared' is not for namespace default; it is for: a, b"),
    ],
)
def test_pool_that_a_pipeline_cannot_use_is_named(options, message):
    with pytest.raises(PlanningError, match=f"budget.pool {message}"):
        Table("one", **options).tick("one", 5.0)
    Table("one", namespaces=("default",)).tick("one", 5.0)


def test_new_pipeline_waits_for_a_full_pool_and_is_woken():
    table = Table("one", "other", cores=6.0)
    table.tick("one", 600.0)
    assert table.cores() == 6.0
    with pytest.raises(PlanningError, match=r"pool shared has 0 cores and 0 GPUs free until other pipelines"):
        table.tick("other", 60.0)
    assert table.woken == ["one"]
    table.settle()

    assert expected(table.plans["other"]).cores >= 2


def test_a_pipeline_without_a_pool_plans_alone():
    table = Table("one", pool=None, budget="4")
    table.tick("one", 60.0)

    assert expected(table.plans["one"]).cores <= 4


@pytest.mark.parametrize("load_rps", [None, 300.0], ids=["new", "lost its profiles"])
def test_member_without_profiles_keeps_what_it_holds_only(load_rps):
    table = Table("good", "bad")
    table.loads["bad"], held = 20.0, 0.0
    if load_rps is not None:
        table.tick("bad", load_rps)
        held = table.cores()
    for _ in range(2):
        with pytest.raises(PlanningError, match="has no profile"):
            table.planners["bad"](table.pipeline, {}, table.planning_inputs("bad"))
        table.tick("good", 300.0, wait=True)

    assert 2 <= expected(table.plans["good"]).cores <= POOL.cores - held
    table.tick("bad", 20.0, wait=True)
    table.settle()
    assert expected(table.plans["bad"]).cores >= 2


def test_newcomer_too_large_for_the_pool_stops_no_other():
    table = Table("one", "other", "large")
    table.tick("one", 20.0)
    table.tick("other", 20.0)
    table.settle()
    stages = tuple(stage.replace(min_replicas=3) for stage in table.pipeline.spec.stages)
    large = table.pipeline.with_spec(stages=stages)
    table.loads["large"] = 20.0
    with pytest.raises(PlanningError, match="until other pipelines release theirs"):
        table.planners["large"](large, table.profiles, table.planning_inputs("large"))
    table.tick("one", 300.0, wait=True)
    table.settle()

    assert expected(table.plans["one"]).cores > expected(table.plans["other"]).cores


class Profiles(dict[str, ModelProfile]):
    """Profiles that count how often they are read, and are read only when the gate is open."""

    def __init__(self, content):
        super().__init__(content)
        self.gate, self.reading, self.reads = threading.Event(), threading.Event(), 0
        self.gate.set()

    def __getitem__(self, stage):
        self.reads += 1
        self.reading.set()
        assert self.gate.wait(60)
        return super().__getitem__(stage)


def test_pipelines_join_and_leave_during_a_decision():
    table = Table("one", "other")
    slow = Profiles(table.profiles)
    slow.gate.clear()
    table.loads["one"] = 60.0
    with ThreadPoolExecutor(1) as solving:
        decision_lock = solving.submit(table.planners["one"], table.pipeline, slow, table.planning_inputs("one"))
        assert slow.reading.wait(60)
        alone = a_ladder(budget={"cores": "4"})
        planner = table.pools.planner("alone", alone, None, lambda: None)
        plan = planner(alone, table.profiles, initial_inputs(20.0))
        table.pools.remove("other")
        assert not decision_lock.done()
        slow.gate.set()
        assert expected(decision_lock.result(60)).cores <= POOL.cores
    assert expected(plan).cores <= 4


def test_a_tick_solves_only_for_the_pipeline_that_ticks():
    table, counted = Table("one", "other"), {}
    for name in ("one", "other"):
        table.loads[name] = 400.0  # more than the pool carries: parts of the load are tried as well
        counted[name] = table.profiles = Profiles(table.profiles)
        table.tick(name, 400.0, wait=True)
    before = counted["other"].reads
    table.profiles = counted["one"]
    table.tick("one", 400.0, wait=True)
    table.tick("one", 400.0, wait=True)

    assert counted["other"].reads == before


def test_pool_decisions_use_threads_of_their_own():
    pooled, alone, gate = a_ladder(budget={"cores": "4", "pool": "shared"}), a_ladder(), threading.Event()
    solving = SolverPool(["shared"])
    try:
        waiting = [solving.threads(pooled).submit(gate.wait, 60) for _ in range(4)]
        assert solving.threads(alone).submit(str, 1).result(60) == "1"
        assert not any(decision.done() for decision in waiting)
    finally:
        gate.set()
        solving.close()
