"""Equality of router and simulator: the same arrivals, service times and plans give the same batches.

Each scenario is simulated, and its requests are sent through a real `Router` with a fake clock and fake transports. The
batches are compared one by one: dispatch time, stage, replica, variant, operating point and rows.
"""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from tests.builders import a_chain, a_pipeline, a_plan, a_point_profile, a_profile, a_variant
from tests.clocks import FakeClock
from tests.router.fakes import a_call
from trimtab_adapter.simulation import simulator as simulation
from trimtab_adapter.simulation.environment import Environment, Failure
from trimtab_adapter.simulation.replica_set import SimulatedReplicaSet
from trimtab_adapter.simulation.simulator import Scenario, transports
from trimtab_pipelines.request_outcome import DROPPED, FAILED, LATE, OK, REFUSED
from trimtab_pipelines.scheduling_policies import PRODUCT_POLICIES
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, RequestOptions
from trimtab_router.router import Router
from trimtab_router.scheduling.batch_completion import QueryOfDeathDetector
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, WaitUntil
from trimtab_router.scheduling.queue_admission import GRACE_SECONDS
from trimtab_router.scheduling.stage_request import EscalationRule

ACCURACIES = {"default": 0.9, "middling": 0.8, "quick": 0.7}
READS = {"default": ["x", "z"], "middling": ["x"], "quick": ["z"]}
"""Inputs that batches at these points carry, of a stage with optional inputs."""
TASKS = (
    {"name": "hurried", "storageUri": "random://?seed=1", "latency": "50ms", "utility": 0.5},
    {"name": "patient", "storageUri": "random://?seed=2", "latency": "20s", "utility": 2.0},
)
"""Their latencies are below every SLO and above the longest timeout."""


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop that counts its ready callbacks."""

    def ready_callbacks(self) -> int:
        return len(self._ready)  # type: ignore[attr-defined]


class TurningClock(FakeClock):
    """Fake clock that runs all ready tasks of the event loop between its timers."""

    async def run(self, until):
        loop = cast("CountingLoop", asyncio.get_running_loop())
        while self._due and self._due[0][0] <= until:
            self.step()
            while loop.ready_callbacks():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        self.now = until


def record_dispatches(transports):
    """The list to which each transport adds its batches when they are dispatched."""
    dispatches = []

    def send(name, transport, original_send, batch, ended):
        index = [replica.slots for replica in transport.replicas].index(batch.replica)
        slices = [(round(rows.request.owner.arrived_at, 9), rows.start, rows.stop) for rows in batch.row_slices]
        dispatches.append((round(batch.dispatched_at, 9), name, index, *batch.key, slices))
        original_send(batch, ended)

    for name, transport in transports.items():
        transport.send = partial(send, name, transport, transport.send)
    return dispatches


def simulated(scenario):
    running = simulation.Simulator(scenario)
    dispatches = record_dispatches(running.transports)
    return dispatches, running.run().outcomes.tolist()


def served(scenario):
    # all rows of a fan-out have the same content here
    with patch.object(QueryOfDeathDetector, "add"), asyncio.Runner(loop_factory=CountingLoop) as runner:
        return runner.run(_served(scenario))


async def _served(scenario):
    clock, pipeline, environment = TurningClock(), scenario.pipeline, scenario.environment
    transports_by_stage = transports(scenario, clock, lambda replica: replica_set.remove_drained(replica))  # noqa: PLW0108 - there is none yet
    dispatches = record_dispatches(transports_by_stage)
    router = Router(pipeline, scenario.plan, policy=scenario.policy, clock=clock, transports=transports_by_stage)
    router.wait_for_tables()  # computed by a thread; a simulation does not include that time
    for name, transport in transports_by_stage.items():
        transport.scheduler = router.schedulers[name]
    replica_set = SimulatedReplicaSet(
        transports_by_stage, pipeline.spec, environment.startup_seconds, cast("Any", clock)
    )
    replica_set.begin(scenario.plan)
    ends = [FAILED] * len(scenario.arrivals_seconds)
    for index, at in enumerate(scenario.arrivals_seconds.tolist()):
        call = a_call(pipeline, a_request_of(scenario, index), at)
        clock.call_at(at, partial(_arrive, router, clock, partial(ends.__setitem__, index), call))
    for at, plan in scenario.changes:
        clock.call_at(at, partial(router.apply_plan, plan))
        clock.call_at(at, router.wait_for_tables)
        clock.call_at(at, partial(replica_set.follow, plan))
    for failure in environment.failures:
        clock.call_at(failure.at_seconds, partial(replica_set.lose_one, failure.stage))
    await clock.run(scenario.duration_seconds + 2.0 * pipeline.spec.slo.latency_seconds + 10.0 * GRACE_SECONDS)
    return dispatches, ends


_running: set[asyncio.Task[None]] = set()


def _arrive(router, clock, end, call):
    task = asyncio.ensure_future(_infer(router, clock, end, call))
    _running.add(task)
    task.add_done_callback(_running.discard)


def a_request_of(scenario, index):
    """The same request in the protocol."""
    rows, options = scenario.rows or (1,), scenario.options or (NO_OPTIONS,)
    request_options = options[index % len(options)]
    parameters: dict[str, Any] = {"priority": request_options.priority, "trimtab.utility": str(request_options.utility)}
    if request_options.accuracy_floor:
        parameters["trimtab.accuracy_floor"] = request_options.accuracy_floor
    if request_options.task:
        parameters["trimtab.task"] = request_options.task
    if request_options.timeout_seconds:
        parameters["timeout"] = int(request_options.timeout_seconds * 1e6)
    value = np.full((rows[index % len(rows)], 4), index, np.float32)
    missing_inputs = scenario.missing_inputs[index % len(scenario.missing_inputs)] if scenario.missing_inputs else ()
    inputs = tuple(
        Tensor.of(given.name, value) for given in scenario.pipeline.spec.inputs if given.name not in missing_inputs
    )
    return InferRequest("sample", inputs, parameters=parameters if request_options is not NO_OPTIONS else {})


async def _infer(router, clock, end, call):
    promised = promised_seconds(router.pipeline.spec.slo.latency_seconds, call.request.parameters)
    try:
        await router.infer(call)
    except Refusal as refusal:
        end(refusal.outcome)
        return
    end(LATE if clock.now - call.arrived_at > promised else OK)


def promised_seconds(slo_seconds, parameters):
    """Deadline of a request: its own timeout, else its task's, else the SLO; at most ten times the SLO."""
    granted = {"hurried": 0.05, "patient": 20.0}.get(parameters.get("trimtab.task"), slo_seconds)
    return min(parameters.get("timeout", granted * 1e6) / 1e6, 10.0 * slo_seconds)


def escalate_a_third(view):
    """Dispatch all rows at their fastest point, and escalate the least confident third."""
    drops = []
    for head in view.waiting:
        points = sorted(view.points_for(head), key=lambda point: point.seconds(view.max_batch_rows))
        if not points:
            drops.append(head)
            continue
        best = view.points[0]
        again = EscalationRule(0.33, best.name, accuracy=0.85, variant=best.variant) if points[0] is not best else None
        candidates = view.candidates(head, points[0])
        return Dispatch(points[0], candidates.first(min(view.max_batch_rows, candidates.rows)), drops, again)
    return WaitUntil(drops=drops)


def a_random_scenario(seed):
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 4))
    pipeline = a_random_pipeline(rng, stages)
    profiles = {stage.name: a_random_profile(rng, stage) for stage in pipeline.spec.stages}
    plans = [a_random_plan(rng, pipeline, generation) for generation in range(1, 2 + int(rng.integers(0, 3)))]
    seconds = 3.0
    arrivals = rng.uniform(0, seconds, int(rng.integers(20, 400)))
    bursts = np.repeat(rng.uniform(0, seconds, 4), rng.integers(1, 12, 4))
    failures = [
        Failure(float(rng.uniform(0.2, seconds)), f"stage-{rng.integers(stages)}") for _ in range(rng.integers(0, 4))
    ]
    return Scenario(
        pipeline=pipeline,
        profiles=profiles,
        arrivals_seconds=np.sort(np.concatenate([arrivals, bursts + rng.uniform(0, 1e-6, bursts.size)])),
        duration_seconds=seconds,
        plan=plans[0],
        changes=tuple((float(rng.uniform(0.5, seconds)), plan) for plan in plans[1:]),
        environment=Environment(
            startup_seconds=float(rng.uniform(0.1, 1.0)),
            factors={
                (stage.name, v.name): tuple(np.exp(rng.normal(0, rng.uniform(0, 0.4), 64)).tolist())
                for stage in pipeline.spec.stages
                for v in stage.variants
            },
            contention=float(rng.choice([0.0, 0.2])),
            failures=tuple(failures),
        ),
        **options_of(rng, pipeline),
        missing_inputs=tuple(map(frozenset, rng.choice(["", "", "x", "z"], 7)))
        if len(pipeline.spec.inputs) > 1
        else (),
        seed=int(seed),
    )


def options_of(rng, pipeline):
    """Request options of every other scenario, and a policy with escalations in some."""
    certain = any(stage.confidence for stage in pipeline.spec.stages)
    policy = Policy(escalate_a_third, uses_fallbacks=True) if certain and rng.random() < 0.6 else None
    if rng.random() < 0.5:
        return {"policy": policy}
    options = [
        RequestOptions(
            timeout_seconds=float(rng.choice([0.1, 0.4, 6.0])) if rng.random() < 0.3 else None,
            accuracy_floor=float(rng.choice([0.0, 0.5, 0.75, 0.95])),
            utility=float(rng.choice([0.5, 1.0, 3.0])),
            task=str(rng.choice(["", "", "", "hurried", "patient", "unheard-of"])),
            priority=int(rng.integers(1, 6)),
        )
        for _ in range(12)
    ]
    return {"policy": policy, "options": (*options, NO_OPTIONS), "rows": tuple(rng.integers(1, 6, 7).tolist())}


def a_random_profile(rng, stage):
    light, quick, middling = rng.uniform([0.001, 0.0005], [0.004, 0.003], (3, 2))
    default = rng.uniform(0.003, 0.015, 2)
    heavy = {"default": default, "middling": middling + quick, "quick": quick}
    cores = stage.variant("heavy").resources.cpu
    points = [a_point_profile("heavy", constant, linear, cores, name) for name, (constant, linear) in heavy.items()]
    return a_profile(stage.name, [a_point_profile("light", *light), *points])


def a_random_pipeline(rng, stages):
    """A pipeline of two variants a stage, which two in five pipelines host together."""
    chain, senses, shared = a_chain(stages), rng.random() < 0.4, rng.random() < 0.4
    cores, most_rows = ("1", 16) if shared else ("2", 4)
    for stage in chain:
        reads = READS if senses and stage is chain[0] else {}
        points = [{"name": n, "accuracy": a, "modalities": reads.get(n, [])} for n, a in ACCURACIES.items()]
        stage["variants"] = [
            a_variant("light", accuracy=0.8, resources={"cpu": "1"}, maxBatchSize=16, tasks=TASKS),
            a_variant(
                "heavy",
                accuracy=0.9,
                resources={"cpu": cores},
                maxBatchSize=most_rows,
                operatingPoints=points,
                tasks=TASKS,
            ),
        ]
    names = "xz" if senses else "x"
    chain[0]["inputs"] = [{"name": n, "from": f"request.inputs.{n}", "optional": senses} for n in names]
    if stages > 1 and rng.random() < 0.5:
        chain[0]["outputs"] = [
            {"name": "n", "datatype": "INT64"},
            {"name": "y", "datatype": "FP32", "shape": [4], "countedBy": "n", "expectedRows": 1.7},
        ]
    if rng.random() < 0.4:
        chain[-1]["outputs"] = [*chain[-1]["outputs"], {"name": "sure", "datatype": "FP32"}]
        chain[-1]["confidence"] = "sure"
    return a_pipeline(
        chain,
        inputs=[{"name": name, "datatype": "FP32", "shape": [4], "optional": senses} for name in names],
        slo={"latency": str(rng.choice(["60ms", "150ms", "500ms"]))},
        schedulingPolicy=str(rng.choice(list(PRODUCT_POLICIES))),
        dropPolicy=str(rng.choice(["Predicted", "Predicted", "Expired", "Never"])),
        queue={"maxRows": int(rng.choice([30, 1000]))},
        budget={"cores": "8"},
    )


def a_random_plan(rng, pipeline, generation):
    variant = str(rng.choice(["light", "heavy"]))
    stage = pipeline.spec.stages[-1]
    shared = len(stage.hosted_with(variant)) > 1
    grouped = not shared and rng.random() < 0.5
    seconds = {1: 0.005, 4: 0.012} if rng.random() < 0.7 else {}
    points: list[dict[str, Any]] = [
        {"name": name, "accuracy": accuracy, "serviceSeconds": {1: 0.012 * accuracy**5, 4: 0.024 * accuracy**5}}
        for name, accuracy in ACCURACIES.items()
    ]
    if shared or grouped:
        look = {"to": "default", "variant": "heavy", "confidenceBelow": 0.4, "share": 0.3, "accuracy": 0.88}
        looks: dict[str, Any] = {"escalations": [look] if stage.confidence else []}
        light: dict[str, Any] = {"name": "default", "accuracy": 0.75, "serviceSeconds": {1: 0.003, 4: 0.006}} | looks
        points = [*[point | {"variant": "heavy"} for point in points[:2]], light, points[2] | {"variant": "heavy"}]
        points = [{"variant": "light"} | point for point in points]
    planned = int(rng.integers(len(points)))
    variant = points[planned].get("variant", variant)
    of_points: dict[str, Any] = {
        "operatingPoint": points[planned]["name"],
        "upgrades": points[:planned],
        "fallbacks": points[planned + 1 :],
        **{name: points[planned][name] for name in ("accuracy", "escalations") if name in points[planned]},
    }
    return a_plan(
        pipeline,
        generation,
        variant=variant,
        batchSize=int(rng.choice([1, 4, 8])),
        replicas=int(rng.integers(1, 3)),
        cores=pipeline.spec.stages[0].variant(variant).resources.cpu,
        serviceSeconds=seconds,
        shadowPrice=float(rng.choice([0.0, 20.0])),
        **(of_points if shared or grouped or variant == "heavy" else {}),
        **({"otherGroups": [_another_group(rng, pipeline, variant)]} if grouped else {}),
        **({"plannedEscalation": look} if grouped and variant == "light" and stage.confidence else {}),
    )


def _another_group(rng, pipeline, planned):
    """Replicas of the variant that replicas of the planned one do not host."""
    other = "light" if planned == "heavy" else "heavy"
    cores = pipeline.spec.stages[0].variant(other).resources.cpu
    return {"variant": other, "replicas": int(rng.integers(1, 3)), "cores": cores}


@pytest.mark.parametrize("seed", range(200))
def test_router_and_simulator_dispatch_the_same_batches(seed):
    scenario = a_random_scenario(seed)
    in_simulation, in_router = simulated(scenario), served(scenario)

    assert len(in_simulation[0]) > 5
    assert in_router[0] == in_simulation[0]
    assert in_router[1] == in_simulation[1]


def second_passes(dispatches):
    """Dispatch time, stage, and the rows that ran before, of each batch with such rows; of a run without faults."""
    before: set[tuple[str, float, int]] = set()
    for at, stage, *_, slices in dispatches:
        rows = {(stage, arrived_at, row) for arrived_at, start, stop in slices for row in range(start, stop)}
        if again := rows & before:
            yield at, stage, again
        before |= rows


def test_both_lose_a_replica_during_a_second_pass_alike():
    changed, retried = 0, 0
    for seed in range(50):
        scenario = a_random_scenario(seed)
        scenario = replace(scenario, changes=(), environment=replace(scenario.environment, failures=()))
        if not scenario.pipeline.spec.stages[-1].confidence:
            continue
        without_fault = simulated(scenario)
        for at, stage, rows in [*second_passes(without_fault[0])][1:3]:
            environment = replace(scenario.environment, failures=(Failure(at + 1e-6, stage),))
            faulty = replace(scenario, environment=environment)
            in_simulation = simulated(faulty)
            assert served(faulty) == in_simulation, seed
            later = [again for again_at, _, again in second_passes(in_simulation[0]) if again_at > at + 1e-6]
            retried += any(rows & again for again in later)
            changed += in_simulation != without_fault

    assert changed > 10
    assert retried > 3


def test_scenarios_cover_every_outcome_and_fault():
    ends, lost, changed, again, wishing, lacking, mixed, crossed = set(), 0, 0, 0, 0, 0, 0, 0
    points: dict[str, set[str]] = {}
    for seed in range(60):
        scenario = a_random_scenario(seed)
        dispatches, found = simulated(scenario)
        ends |= set(found)
        decides = "" if scenario.policy else scenario.pipeline.spec.policy_name
        points.setdefault(decides, set()).update(dispatch[4] for dispatch in dispatches)
        lost += len(scenario.environment.failures)
        changed += len(scenario.changes)
        wishing += bool(scenario.options)
        lacking += any(scenario.missing_inputs)
        row_slices = {(member, dispatch[1]) for dispatch in dispatches for member in dispatch[5]}
        variants: dict[Any, set[str]] = {}
        for dispatch in dispatches:
            for member in dispatch[5]:
                variants.setdefault((dispatch[1], member), set()).add(dispatch[3])
        crossed += any(len(served_by) > 1 for served_by in variants.values())
        changed_at = min((at for at, _ in scenario.changes), default=scenario.duration_seconds)
        first = {dispatch[3] for dispatch in dispatches if dispatch[1] == "stage-0" and dispatch[0] < changed_at}
        mixed += len(first) > 1
        again += scenario.policy is not None and len(row_slices) < sum(len(dispatch[5]) for dispatch in dispatches)

    assert ends >= {OK, LATE, DROPPED, REFUSED}
    assert points.keys() == {"", *PRODUCT_POLICIES}
    assert min(map(len, points.values())) > 1
    assert min(lost, changed) > 30
    assert min(wishing, again, lacking) > 5
    assert min(mixed, crossed) > 3, "batches of two hosted variants, and rows that escalate from one to the other"
    assert simulated(replace(scenario, seed=1)) != simulated(scenario)
