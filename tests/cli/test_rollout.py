"""The rollout keeps the budget at every step, always arrives, and leaves no stage without a ready replica."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import a_pipeline, a_plan, a_stage, a_variant
from trimtab.local.rollout import (
    Action,
    MarkDraining,
    Replica,
    Resize,
    StageTarget,
    Start,
    Stop,
    backoff_seconds,
    decide,
    free_devices,
    matches,
    servable_variants,
)
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import DocumentError, dump_yaml

VARIANTS = {"s": 0.25, "m": 0.5, "l": 1.0}


class Machine:
    """Executes actions as processes would: starts and drains take a while."""

    def __init__(self, limit: float, *, hosts_all: bool) -> None:
        self.limit = limit
        self.hosts_all = hosts_all
        self.replicas: list[Replica] = []
        self.serving: dict[str, str] = {}
        self.now = 0.0
        self.started = 0

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Start):
            variants = frozenset(VARIANTS) if self.hosts_all else frozenset({action.variant})
            name = f"{action.stage}-{self.started}"
            self.replicas.append(Replica(name, action.stage, action.variant, variants, action.cores, "starting"))
            self.started += 1
            return
        place, replica = next((n, r) for n, r in enumerate(self.replicas) if r.name == action.name)
        if isinstance(action, Resize):
            changed = replace(replica, variant=action.variant, cores=action.cores)
        elif isinstance(action, MarkDraining):
            changed = replace(replica, state="draining", draining_since=self.now)
        else:
            changed = replace(replica, state="stopping")
        self.replicas[place] = changed

    def step(self, targets: list[StageTarget]) -> Iterator[Action]:
        self.route(targets)
        for action in decide(targets, self.replicas, limit_cores=self.limit, serving=self.serving, now=self.now):
            self.carry_out(action)
            assert self.cores <= self.limit + 1e-6
            yield action

    def route(self, targets: list[StageTarget]) -> None:
        for target in reversed(targets):  # the first target of a stage names its variant
            ready = [r for r in self.replicas if r.stage == target.stage and r.state == "ready"]
            if any(target.variant in servable_variants(r, target, VARIANTS) for r in ready):
                self.serving[target.stage] = target.variant

    def progress(self, data: st.DataObject) -> None:
        """Advance one process, drawn at random; ended ones leave the list."""
        self.now += 1.0
        moving = [
            n for n, r in enumerate(self.replicas) if r.state != "ready" and not (r.state == "draining" and r.idle)
        ]
        if not moving:
            return
        n = data.draw(st.sampled_from(moving))
        replica = self.replicas[n]
        if replica.state == "stopping":
            del self.replicas[n]
        elif replica.state == "starting":
            self.replicas[n] = replace(replica, state="ready")
        else:
            self.replicas[n] = replace(replica, idle=True)

    @property
    def cores(self) -> float:
        return sum(replica.cores for replica in self.replicas)

    def ready(self, stage: str) -> int:
        return sum(r.stage == stage and r.state == "ready" for r in self.replicas)

    def arrived(self, targets: list[StageTarget]) -> bool:
        return all(r.state == "ready" for r in self.replicas) and all(
            sum(matches(r, t) for r in self.replicas if r.stage == t.stage) == t.replicas
            and sum(r.stage == t.stage for r in self.replicas) == sum(o.replicas for o in targets if o.stage == t.stage)
            for t in targets
        )


@st.composite
def plans(draw: st.DrawFn) -> tuple[float, list[list[StageTarget]]]:
    stages = [f"stage{n}" for n in range(draw(st.integers(1, 3)))]
    plans = []
    for _ in range(draw(st.integers(2, 4))):
        plan = []
        for stage in stages:
            variants = draw(st.lists(st.sampled_from(sorted(VARIANTS)), min_size=1, max_size=2, unique=True))
            plan += [StageTarget(stage, v, draw(st.integers(1, 4)), VARIANTS[v]) for v in variants]
        plans.append(plan)
    budget = max(sum(t.replicas * t.cores for t in plan) for plan in plans)
    return budget, plans


def roll(machine: Machine, targets: list[StageTarget], data: st.DataObject, *, keep_ready: bool) -> None:
    for _ in range(400):
        actions = 0
        for _ in machine.step(targets):
            actions += 1
            if keep_ready:
                assert all(machine.ready(target.stage) >= 1 for target in targets)
        if not actions and machine.arrived(targets):
            return
        machine.progress(data)
    raise AssertionError(f"never arrived at {targets}: {machine.replicas}")


@pytest.mark.parametrize(
    ("surge_cores", "hosts_all", "keep_ready"),
    [(0.0, False, False), (0.0, True, True), (max(VARIANTS.values()), False, True)],
    ids=["one variant loaded", "all variants loaded", "surge of one replica"],
)
@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_rollout_stays_within_the_budget_and_ends(surge_cores, hosts_all, keep_ready, case, data) -> None:
    budget, sequence = case
    machine = Machine(budget + surge_cores, hosts_all=hosts_all)
    for n, targets in enumerate(sequence):
        roll(machine, targets, data, keep_ready=keep_ready and n > 0)


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans(), st.data())
def test_rollout_recovers_from_deaths_and_new_plans(case, hosts_all, data) -> None:
    budget, sequence = case
    machine = Machine(budget, hosts_all=hosts_all)
    for targets in sequence[:-1]:
        for _ in range(data.draw(st.integers(0, 12))):
            list(machine.step(targets))
            machine.progress(data)
            if machine.replicas and data.draw(st.integers(0, 3)) == 0:
                machine.replicas.pop(data.draw(st.integers(0, len(machine.replicas) - 1)))
    roll(machine, sequence[-1], data, keep_ready=False)


def ready(name: str, variant: str, cores: float, *, loaded: str = "sml") -> Replica:
    return Replica(name, name.partition("-")[0], variant, frozenset(loaded), cores, "ready")


def test_variant_change_of_equal_cores_needs_no_action() -> None:
    """The replica has loaded the variant: the router switches, no process does."""
    actions = decide(
        [StageTarget("read", "m", 1, 1.0)], [ready("read-0", "s", 1.0)], limit_cores=1, serving={"read": "s"}, now=0
    )

    assert actions == []


def test_replica_shrinks_after_the_router_switched() -> None:
    target, replica = StageTarget("read", "s", 1, 0.25), ready("read-0", "l", 1.0)

    assert decide([target], [replica], limit_cores=1, serving={"read": "l"}, now=0) == []
    assert decide([target], [replica], limit_cores=1, serving={"read": "s"}, now=0) == [Resize("read-0", "s", 0.25)]


def test_replica_grows_into_cores_that_a_later_stage_releases() -> None:
    targets = [StageTarget("locate", "l", 1, 1.0), StageTarget("read", "m", 1, 0.5)]
    replicas, serving = [ready("locate-0", "m", 0.5), ready("read-1", "l", 1.0)], {"locate": "m", "read": "m"}

    assert decide(targets, replicas, limit_cores=1.5, serving=serving, now=0) == [
        Resize("read-1", "m", 0.5),
        Resize("locate-0", "l", 1.0),
    ]


def test_new_replica_starts_before_the_old_one_drains() -> None:
    target, old = StageTarget("read", "l", 1, 1.0), ready("read-0", "s", 1.0, loaded="s")
    new = ready("read-1", "l", 1.0, loaded="l")

    assert decide([target], [old], limit_cores=2, serving={"read": "s"}, now=0) == [Start("read", "l", 1.0)]
    assert decide([target], [old, new], limit_cores=2, serving={"read": "s"}, now=0) == []
    assert decide([target], [old, new], limit_cores=2, serving={"read": "l"}, now=0) == [MarkDraining("read-0")]


def test_replica_drains_first_if_the_budget_holds_one() -> None:
    target, old = StageTarget("read", "l", 1, 1.0), ready("read-0", "s", 1.0, loaded="s")

    assert decide([target], [old], limit_cores=1, serving={"read": "s"}, now=0) == [MarkDraining("read-0")]


def test_drained_replica_stops_when_idle_or_timed_out() -> None:
    draining = replace(ready("read-0", "s", 0.25), state="draining", draining_since=10.0)
    kept, target = ready("read-1", "s", 0.25), StageTarget("read", "s", 1, 0.25)

    def at(now: float, replica: Replica, drain_seconds: float = 30.0) -> list[Action]:
        replicas, serving = [replica, kept], {"read": "s"}
        return decide([target], replicas, limit_cores=1, serving=serving, now=now, drain_seconds=drain_seconds)

    assert at(12.0, draining) == at(41.0, draining, 60.0) == []
    assert at(12.0, replace(draining, idle=True)) == [Stop("read-0")]
    assert at(41.0, draining) == [Stop("read-0")]


def test_start_waits_for_the_backoff() -> None:
    target = StageTarget("read", "s", 1, 0.25)

    assert decide([target], [], limit_cores=1, serving={}, now=4.9, not_before={"read": 5.0}) == []
    assert decide([target], [], limit_cores=1, serving={}, now=5.0, not_before={"read": 5.0}) == [
        Start("read", "s", 0.25)
    ]


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_seconds(n) for n in (0, 1, 2, 3, 4)] == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert backoff_seconds(1000) == 30.0


def test_gpu_is_refused_where_there_is_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    variants = [a_variant("large", resources={"gpu": 1}), a_variant("small")]
    pipeline = a_pipeline([a_stage(variants=variants)], budget={"cores": "4", "gpus": 1})
    file = tmp_path / "pipeline.yaml"
    file.write_text(dump_yaml(pipeline))
    with pytest.raises(DocumentError, match=r"the plan requests 1 GPUs, and this machine has 0$"):
        Supervisor(Setup(file, tmp_path, plan=a_plan(pipeline)))

    file.write_text(dump_yaml(a_pipeline([a_stage(variants=variants[:1])], budget={"cores": "4", "gpus": 1})))
    with pytest.raises(DocumentError, match=r"stage first: its variants request 1 GPUs or more, and this machine has"):
        Supervisor(Setup(file, tmp_path))


def test_replicas_wait_for_a_free_device_each() -> None:
    target = StageTarget("read", "l", 3, 1.0, gpus=1)
    start = Start("read", "l", 1.0, gpus=1)
    waiting = decide([target], [], limit_cores=8.0, limit_gpus=2, serving={}, now=0.0)
    first = Replica("read-0", "read", "l", frozenset("l"), 1.0, "ready", ("4",))

    assert waiting == [start, start]
    assert decide([target], [first], limit_cores=8.0, limit_gpus=2, serving={}, now=0.0) == [start]
    assert decide([target], [first], limit_cores=8.0, limit_gpus=1, serving={}, now=0.0) == []
    assert free_devices(["3", "4", "7"], [first]) == ["3", "7"]


def test_servable_variants_fit_the_reserved_cores() -> None:
    target = StageTarget("read", "m", 1, 0.5)

    assert servable_variants(ready("read-0", "m", 0.5), target, VARIANTS) == {"s", "m"}
    assert servable_variants(ready("read-0", "l", 0.5), target, VARIANTS) == {"s", "m", "l"}
    assert servable_variants(ready("read-0", "s", 0.25, loaded="s"), target, VARIANTS) == {"s"}


def test_encoders_stop_after_the_switch_to_colocated():
    targets = [StageTarget("encode", "e", 0, 0.5), StageTarget("answer", "whole", 1, 1.0)]
    encoder = Replica("encode-0", "encode", "e", frozenset({"e"}), 0.5, "ready")
    both = Replica("answer-1", "answer", "pulls", frozenset({"pulls", "whole"}), 1.0, "ready")

    def actions(serving: str) -> list[Action]:
        return decide(targets, [encoder, both], limit_cores=2.0, serving={"encode": "e", "answer": serving}, now=0.0)

    assert actions("pulls") == []
    assert actions("whole") == [MarkDraining("encode-0")]
