"""Rollout: within the budget at each step, always complete, and without needless disruption."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, Target, decide, surge_allowed, total

SIZES = {"s": 0.25, "m": 0.5, "l": 1.0}


@dataclass
class Pods:
    """The pods of one hosting set, as a cluster keeps them."""

    desired: int = 0
    starting: int = 0
    ready: int = 0
    terminating: int = 0


@dataclass
class Cluster:
    """Makes pods, lets them become ready and go, each when chance says so."""

    limit: Capacity
    never_ready: frozenset[str] = frozenset()
    sets: dict[tuple[str, str], Pods] = field(default_factory=dict)

    def observe(self) -> list[ReplicaGroupState]:
        return [
            ReplicaGroupState(
                name=f"{stage}-{size}",
                stage=stage,
                per_replica=Capacity(SIZES[size]),
                desired=pods.desired,
                present=pods.starting + pods.ready,
                ready=pods.ready,
                terminating=pods.terminating,
            )
            for (stage, size), pods in self.sets.items()
        ]

    def write(self, desired: dict[str, int]) -> None:
        for name, count in desired.items():
            stage, _, size = name.rpartition("-")
            self.sets.setdefault((stage, size), Pods()).desired = count

    def make_and_remove(self) -> None:
        """What a Deployment's controller does at once; pods that are not ready go first."""
        for pods in self.sets.values():
            pods.starting += max(pods.desired - pods.starting - pods.ready, 0)
            while pods.starting + pods.ready > pods.desired:
                if pods.starting:
                    pods.starting -= 1
                else:
                    pods.ready -= 1
                pods.terminating += 1

    def moves(self) -> list[tuple[Pods, str]]:
        able = [(pods, "terminating") for pods in self.sets.values() if pods.terminating]
        for (_, size), pods in self.sets.items():
            if pods.starting and size not in self.never_ready:
                able.append((pods, "starting"))
        return able

    def progress(self, data: st.DataObject) -> None:
        able = self.moves()
        if not able:
            return
        pods, what = able[data.draw(st.integers(0, len(able) - 1))]
        if what == "terminating":
            pods.terminating -= 1
        else:
            pods.starting -= 1
            pods.ready += 1

    @property
    def cores(self) -> float:
        return sum(SIZES[size] * (p.starting + p.ready + p.terminating) for (_, size), p in self.sets.items())

    def ready(self, stage: str) -> int:
        return sum(pods.ready for (owner, _), pods in self.sets.items() if owner == stage)

    def arrived(self, targets: list[Target]) -> bool:
        wanted = {target.name: target.replicas for target in targets}
        return all(
            pods.desired == pods.ready == wanted.get(f"{stage}-{size}", 0) and not pods.terminating
            for (stage, size), pods in self.sets.items()
        )


def a_target(stage: str, size: str, replicas: int) -> Target:
    return Target(stage, f"{stage}-{size}", replicas, Capacity(SIZES[size]))


@st.composite
def plans(draw: st.DrawFn, most_groups: int = 2) -> tuple[Capacity, list[list[Target]]]:
    """A budget, and plans within it for the same stages of one or two groups; all but the first may have no replica."""
    stages = [f"stage{n}" for n in range(draw(st.integers(1, 3)))]
    found = [
        [
            a_target(stage, size, draw(st.integers(0 if n and len(sizes) == 1 else 1, 4)))
            for n, stage in enumerate(stages)
            for sizes in [draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=most_groups, unique=True))]
            for size in sizes
        ]
        for _ in range(draw(st.integers(2, 4)))
    ]
    return Capacity(max(total(t.requested for t in plan).cores for plan in found)), found


def step(cluster: Cluster, targets: list[Target]) -> dict[str, int]:
    desired = decide(targets, cluster.observe(), cluster.limit)
    cluster.write(desired)
    cluster.make_and_remove()
    assert cluster.cores <= cluster.limit.cores + 1e-6
    return desired


def roll(cluster: Cluster, targets: list[Target], data: st.DataObject, *, keep_ready: bool = False) -> None:
    kept = [target for target in targets if keep_ready and target.replicas and cluster.ready(target.stage)]
    for _ in range(400):
        step(cluster, targets)
        assert all(cluster.ready(target.stage) >= 1 for target in kept)
        if cluster.arrived(targets):
            return
        cluster.progress(data)
    raise AssertionError(f"never arrived at {targets}: {cluster.sets}")


@settings(max_examples=80, deadline=None)
@given(plans(), st.data())
def test_surge_capacity_keeps_every_stage_ready(case, data) -> None:
    budget, sequence = case
    cluster = Cluster(Capacity(budget.cores + max(SIZES.values())))
    for n, targets in enumerate(sequence):
        roll(cluster, targets, data, keep_ready=n > 0)


@settings(max_examples=80, deadline=None)
@given(plans(), st.data())
def test_rollout_completes_while_stages_change(case, data) -> None:
    budget, sequence = case
    cluster = Cluster(budget)
    for targets in sequence:
        renamed = [data.draw(st.sampled_from(["", "again"])) + target.stage for target in targets]
        plan = [
            a_target(stage, target.name.rpartition("-")[2], target.replicas)
            for stage, target in zip(renamed, targets, strict=True)
        ]
        roll(cluster, plan, data)


@settings(max_examples=50, deadline=None)
@given(plans(), st.data())
def test_rollout_completes_despite_disturbances(case, data) -> None:
    """A plan may come while the one before is half done, and pods may die at any time."""
    budget, sequence = case
    cluster = Cluster(budget)
    for targets in sequence[:-1]:
        for _ in range(data.draw(st.integers(0, 12))):
            step(cluster, targets)
            cluster.progress(data)
            alive = [pods for pods in cluster.sets.values() if pods.ready]
            if alive and data.draw(st.integers(0, 3)) == 0:
                alive[data.draw(st.integers(0, len(alive) - 1))].ready -= 1
    roll(cluster, sequence[-1], data)


@settings(max_examples=50, deadline=None)
@given(plans(most_groups=1), st.data())
def test_rollback_from_plan_that_never_becomes_ready(case, data) -> None:
    """Where nothing must be broken first, the replicas of the last good plan serve on, and it is reached again."""
    _, sequence = case
    good = [replace(t, name=f"{t.stage}-s", per_replica=Capacity(SIZES["s"])) for t in sequence[0]]
    bad = [replace(t, name=f"{t.stage}-l", per_replica=Capacity(SIZES["l"])) for t in sequence[1]]
    limit = total(t.requested for t in good) + total(t.requested for t in bad)
    cluster = Cluster(Capacity(limit.cores), never_ready=frozenset({"l"}))
    roll(cluster, good, data)
    for _ in range(30):
        step(cluster, bad)
        cluster.progress(data)
        assert all(cluster.ready(t.stage) == t.replicas for t in good)

    roll(cluster, good, data)


def a_set(name: str, desired: int, **changes: Any) -> ReplicaGroupState:
    stage, _, size = name.rpartition("-")
    return replace(
        ReplicaGroupState(name, stage, Capacity(SIZES[size]), desired, present=desired, ready=desired), **changes
    )


@pytest.mark.parametrize(
    ("sets", "limit", "expected"),
    [
        ([], 1.0, {"read-m": 2}),
        ([a_set("read-m", 2)], 1.0, {"read-m": 2}),
        ([a_set("read-m", 3)], 2.0, {"read-m": 2}),
        ([a_set("read-s", 1)], 1.25, {"read-s": 1, "read-m": 2}),
        ([a_set("read-s", 1), a_set("read-m", 2, ready=1)], 1.25, {"read-s": 1, "read-m": 2}),
        ([a_set("read-s", 1), a_set("read-m", 2)], 1.25, {"read-s": 0, "read-m": 2}),
        ([a_set("read-s", 2)], 1.0, {"read-s": 2, "read-m": 1}),
        ([a_set("read-l", 1)], 1.0, {"read-l": 0, "read-m": 0}),
        ([a_set("read-l", 0, present=0, ready=0, terminating=1)], 1.0, {"read-l": 0, "read-m": 0}),
        ([a_set("read-l", 1, ready=0)], 1.0, {"read-l": 0, "read-m": 0}),
        ([a_set("old-s", 1)], 2.0, {"old-s": 1, "read-m": 2}),
        ([a_set("old-s", 1), a_set("read-m", 2)], 2.0, {"old-s": 0, "read-m": 2}),
        ([a_set("old-s", 2), a_set("read-s", 2)], 1.5, {"old-s": 2, "read-s": 2, "read-m": 1}),
        ([a_set("old-m", 2)], 1.0, {"old-m": 1, "read-m": 0}),
        ([a_set("old-m", 1), a_set("read-m", 1)], 1.0, {"old-m": 0, "read-m": 1}),
        ([a_set("old-l", 1), a_set("read-l", 1)], 2.0, {"old-l": 0, "read-l": 1, "read-m": 0}),
        ([a_set("old-l", 2, ready=0)], 2.0, {"old-l": 0, "read-m": 0}),
    ],
    ids=[
        "starts",
        "rests",
        "takes back what is too many",
        "makes before it breaks",
        "waits until all are ready",
        "lets go of what was replaced",
        "goes replica by replica where there is no room for all",
        "breaks first only where nothing else makes room",
        "waits for what is terminating",
        "gives up at once what is not ready and in the way",
        "keeps a stage that is gone until those there are are ready",
        "clears away a stage that is gone",
        "gives up nothing for what has room",
        "gives up spare replicas of a stage that is gone where they are in the way",
        "gives up the last one, too, where nothing else makes room",
        "gives up the last one of a stage that is gone before that of one there is",
        "gives up at once what is gone, not ready and in the way",
    ],
)
def test_next_step(sets, limit, expected) -> None:
    assert decide([a_target("read", "m", 2)], sets, Capacity(limit)) == expected


@pytest.mark.parametrize(
    ("state", "limit", "desired"),
    [
        (a_set("read-m", 2, leaving=1, ready_leaving=1), 2.0, 3),
        (a_set("read-m", 3, ready=2, leaving=1, ready_leaving=1), 1.5, 3),
        (a_set("read-m", 3, leaving=1, ready_leaving=1), 2.0, 2),
        (a_set("read-m", 2, leaving=1, ready_leaving=1), 1.0, 2),
        (a_set("read-m", 4, ready=3, leaving=4, ready_leaving=3), 9.0, 4),
    ],
    ids=["adds one", "waits for it", "releases the leaving one", "has no room", "adds as many as planned at most"],
)
def test_successors_precede_replicas_on_leaving_nodes(state, limit, desired) -> None:
    assert decide([a_target("read", "m", 2)], [state], Capacity(limit)) == {"read-m": desired}


def test_removed_stage_serves_until_routers_are_updated() -> None:
    plan, sets = [a_target("read", "m", 2)], [a_set("old-s", 1), a_set("read-m", 2)]

    assert decide(plan, sets, Capacity(2.0), new_routes=False) == {"old-s": 1, "read-m": 2}
    assert decide(plan, sets, Capacity(2.0), new_routes=True) == {"old-s": 0, "read-m": 2}


def test_renamed_stage_serves_until_its_successor_does() -> None:
    plan = [a_target("locate", "m", 1), a_target("classifier", "m", 2)]
    sets = [a_set("locate-m", 1), a_set("classify-m", 2)]

    assert decide(plan, sets, Capacity(10.0)) == {"locate-m": 1, "classify-m": 2, "classifier-m": 2}
    sets.append(a_set("classifier-m", 2))
    assert decide(plan, sets, Capacity(10.0)) == {"locate-m": 1, "classify-m": 0, "classifier-m": 2}


def test_all_groups_are_released_without_targets() -> None:
    assert decide([], [a_set("old-s", 2)], Capacity(1.0)) == {"old-s": 0}


def test_unschedulable_pods_are_released_over_the_limit() -> None:
    """Two of four found a node; the limit is what they hold."""
    waiting = a_set("read-m", 4, ready=2, unscheduled=2)

    assert decide([a_target("read", "m", 4)], [waiting], Capacity(1.0)) == {"read-m": 2}


def test_plan_beyond_the_limit_keeps_stages_ready() -> None:
    """It can never become true, so that nothing is given up for it."""
    assert decide([a_target("read", "l", 4)], [a_set("read-s", 2)], Capacity(1.0))["read-s"] == 2


def test_gpus_are_limited_like_cores() -> None:
    target = Target("read", "big", 1, Capacity(1.0, gpus=1))
    old = ReplicaGroupState("small", "read", Capacity(1.0, gpus=1), desired=1, present=1, ready=1)

    assert decide([target], [old], Capacity(8.0, gpus=1)) == {"small": 0, "big": 0}
    assert decide([target], [old], Capacity(8.0, gpus=2)) == {"small": 1, "big": 1}


def test_surge_requires_free_capacity() -> None:
    own, other = a_set("read-m", 1), a_set("locate-m", 1)

    assert surge_allowed(own, [other], Capacity(1.5))
    assert not surge_allowed(own, [other], Capacity(1.0))
    assert surge_allowed(replace(own, surging=True), [other], Capacity(1.5))


def test_idle_stage_is_released_after_others_are_ready() -> None:
    plan = [a_target("encode", "m", 0), a_target("write", "l", 1)]
    encoders, old = a_set("encode-m", 2), a_set("write-m", 1)

    assert decide(plan, [encoders, old], Capacity(4.0)) == {"encode-m": 2, "write-m": 1, "write-l": 1}
    starting = a_set("write-l", 1, ready=0)
    assert decide(plan, [encoders, old, starting], Capacity(4.0)) == {"encode-m": 2, "write-m": 1, "write-l": 1}
    ready = a_set("write-l", 1)
    assert decide(plan, [encoders, old, ready], Capacity(4.0)) == {"encode-m": 0, "write-m": 0, "write-l": 1}


def test_idle_stage_is_released_first_without_capacity() -> None:
    plan = [a_target("encode", "m", 0), a_target("write", "l", 1)]
    encoders, old = a_set("encode-m", 2, ready=1), a_set("write-m", 1)

    assert decide(plan, [encoders, old], Capacity(1.5)) == {"encode-m": 1, "write-m": 1, "write-l": 0}
    assert decide(plan, [a_set("encode-m", 1), old], Capacity(1.0)) == {"encode-m": 0, "write-m": 1, "write-l": 0}
