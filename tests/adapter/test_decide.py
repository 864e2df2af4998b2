"""Decisions: within the budget, explained, infeasible ones least bad, and still while nothing happens."""

import itertools
import math

import numpy as np
import pytest

from tests.adapter.scenes import a_ladder, expected, plan_for, profiles_of, with_stage
from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_stage, a_variant
from trimtab_adapter.planning.decide import PlanningInputs, decide, initial_plan
from trimtab_adapter.planning.hysteresis import MIN_LOAD_RPS, drop_threshold, load_hold_reason, outgrows, planning_load
from trimtab_adapter.planning.planning_problem import PlanningError, PlanningProblem, required_routers, service_ratio
from trimtab_adapter.planning.program_builder import build_program
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import profiles_by_stage
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.spec import RouterSettings

CHEAPEST = {"goal": "MinCost", "accuracyFloor": 0.5}


def variants(plan):
    return [stage.variant for stage in plan.spec.stages]


def test_the_first_plan_takes_the_best_variants_for_a_small_load():
    pipeline = a_ladder()
    plan = initial_plan(pipeline, profiles_of(pipeline), load_rps=1.0, now_seconds=5.0)

    assert variants(plan) == ["heavy", "heavy"]
    assert (plan.spec.generation, plan.spec.created_at) == (1, 5.0)
    assert expected(plan).accuracy == pytest.approx(0.97**2)
    assert plan.spec.explanation.change.startswith("first plan")


def test_plans_use_lighter_variants_at_higher_load():
    pipeline = a_ladder()
    accuracies, plan = [], None
    for n, load_rps in enumerate((5, 50, 200, 500, 1000, 5)):
        plan = plan_for(pipeline, load_rps, plan, now_seconds=1000.0 * n)
        accuracies.append(expected(plan).accuracy)

    assert accuracies[:5] == sorted(accuracies[:5], reverse=True)
    assert accuracies[0] == accuracies[5] > accuracies[2] > accuracies[4]


@pytest.mark.parametrize(("headroom", "target", "replicas"), [(0, 1, 3), (0.1, 1, 4), (0, 0.8, 4), (0.1, 0.8, 5)])
def test_replicas_carry_busiest_second_with_headroom(headroom, target, replicas):
    """At batch 1 a replica carries 500 rows a second; three carry exactly the 1500 that are forecast."""
    adaptation = {"headroom": headroom, "targetUtilization": target}
    stage = a_stage(variants=[a_variant("light")], batchSizes=[1], maxReplicas=9)
    plan = plan_for(a_pipeline([stage], adaptation=adaptation, objective=CHEAPEST), 1500.0)

    assert plan.spec.feasible
    assert [stage.replicas for stage in plan.spec.stages] == [replicas]


@pytest.mark.parametrize(("peak_wait", "replicas"), [(None, 4), (0.125, 3)])
def test_fewer_replicas_if_rows_of_busiest_second_may_wait(peak_wait, replicas):
    """Three replicas carry 1500 rows a second; the other 10 wait for 7 ms, which is part of the latency."""
    adaptation = {"headroom": 0, "targetUtilization": 1} | ({"peakWait": peak_wait} if peak_wait else {})
    stage = a_stage(variants=[a_variant("light")], batchSizes=[1], maxReplicas=9)
    plan = plan_for(a_pipeline([stage], adaptation=adaptation, objective=CHEAPEST), 1510.0)

    assert plan.spec.feasible
    assert [stage.replicas for stage in plan.spec.stages] == [replicas]
    assert plan.spec.stages[0].latency_seconds > 0.006 * (replicas == 3)


def test_plan_explains_change_binding_constraint_and_runner_up():
    pipeline = a_ladder(objective={"goal": "MaxAccuracy"}, budget={"cores": "2"})
    before = plan_for(pipeline, 5.0)
    after = plan_for(pipeline, 60.0, before)
    explanation = after.spec.explanation

    assert "→" in explanation.change
    assert "planned for 60 requests/s by reactive" in explanation.change
    assert explanation.binding_constraint.startswith("budget.cores: without it the objective would gain")
    assert explanation.runner_up is not None
    assert explanation.runner_up.objective_loss > 0
    assert after.spec.generation == before.spec.generation + 1


@pytest.mark.parametrize("goal", ["MaxAccuracy", "MinCost", "Weighted"])
def test_replicas_of_a_peak_are_released_at_any_core_price(goal):
    pipeline = a_ladder(stages=1, objective={"goal": goal, "accuracyFloor": 0.5}, budget={"cores": "40"})
    peak = plan_for(pipeline, 800.0)
    after = plan_for(pipeline, 400.0, peak, now_seconds=9000.0)
    before, now = peak.spec.stages[0], after.spec.stages[0]

    assert now.replicas < before.replicas
    assert now.variant == before.variant
    assert plan_for(pipeline, 390.0, after, now_seconds=9100.0).spec.generation == after.spec.generation


def test_planned_service_seconds_are_profile_medians():
    pipeline = a_ladder()
    slow = {(stage.name, "heavy"): 2.0 for stage in pipeline.spec.stages}
    stage = plan_for(pipeline, 2.0, service_ratios=slow).spec.stages[0]

    assert stage.service_seconds[1] == pytest.approx(0.030)
    assert max(stage.service_seconds) == stage.batch_size


def test_a_slower_machine_gets_lighter_variants():
    pipeline = a_ladder(budget={"cores": "2"})
    current = plan_for(pipeline, 30.0)
    slow = {(stage.name, current.spec.stages[0].variant): 4.0 for stage in pipeline.spec.stages}
    adapted = plan_for(pipeline, 30.0, current, service_ratios=slow)

    assert adapted.spec.feasible
    assert expected(adapted).accuracy < expected(current).accuracy


def test_rows_per_request_multiply_the_load():
    pipeline = a_ladder()
    alone = plan_for(pipeline, 40.0)
    crowded = plan_for(pipeline, 40.0, rows_per_request={"stage-1": 10.0})

    assert crowded.spec.stages[1].throughput_rps >= 400 > alone.spec.stages[1].throughput_rps


def test_pins_are_kept():
    pinned = with_stage(a_ladder(), 1, pin={"variant": "middle", "batchSize": 16, "replicas": 2})
    stage = plan_for(pinned, 5.0).spec.stages[1]

    assert (stage.variant, stage.batch_size, stage.replicas) == ("middle", 16, 2)


def test_unused_latency_enlarges_batches_of_changing_stages_only():
    pipeline = a_ladder()
    plan = plan_for(pipeline, 200.0)
    kept = plan_for(pipeline, 195.0, plan)

    assert max(stage.batch_size for stage in plan.spec.stages) > 4
    assert expected(plan).latency_seconds <= 0.8 * 0.4
    assert kept.spec.stages == plan.spec.stages
    assert kept.spec.generation == plan.spec.generation


def test_overload_is_carried_as_far_as_the_budget_goes():
    pipeline = a_ladder(budget={"cores": "2"})
    plan = plan_for(pipeline, 5000.0)

    assert not plan.spec.feasible
    assert plan.spec.reason.startswith("overload: 2 cores carry")
    assert "of 5e+03 requests/s within slo.latency 400 ms" in plan.spec.reason
    assert variants(plan) == ["light", "light"]
    assert 0.1 < plan.spec.planned_fraction < 0.2


def test_an_slo_out_of_reach_gives_the_fastest_plan():
    plan = plan_for(a_ladder(slo={"latency": "1ms"}), 10.0)

    assert not plan.spec.feasible
    assert plan.spec.reason.startswith("slo.latency 1 ms cannot be reached; the fastest plan needs")
    assert (variants(plan), [stage.batch_size for stage in plan.spec.stages]) == (["light", "light"], [1, 1])
    assert plan.spec.planned_fraction == 1.0


def test_a_floor_out_of_reach_gives_the_most_accurate_plan():
    pipeline = a_ladder(objective={"goal": "MinCost", "accuracyFloor": 0.99})
    plan = plan_for(pipeline, 5.0)

    assert not plan.spec.feasible
    assert plan.spec.reason.startswith("objective.accuracyFloor 0.99 cannot be reached")
    assert "the best is 0.9409" in plan.spec.reason
    assert variants(plan) == ["heavy", "heavy"]


def test_pins_that_do_not_fit_are_given_up_last():
    plan = plan_for(with_stage(a_ladder(budget={"cores": "3"}), 0, pin={"replicas": 50}), 5.0)

    assert not plan.spec.feasible
    assert plan.spec.reason == "the pinned sizes of stage-0 do not fit; without them: the load fits"
    assert expected(plan).cores <= 3


def test_pinned_variant_without_profile_is_given_up():
    pipeline = with_stage(a_ladder(), 0, pin={"variant": "heavy"})
    profiles = profiles_of(pipeline)
    spec = profiles["stage-0"].spec
    profiles["stage-0"] = profiles["stage-0"].with_spec(points=tuple(p for p in spec.points if p.variant != "heavy"))
    plan = decide(pipeline, profiles, PlanningInputs(ForecastRecord(peak_rps=5.0, source="reactive"), 1000.0))

    assert not plan.spec.feasible
    assert plan.spec.reason == "the pins of stage-0 do not fit; without them: the load fits"
    assert variants(plan)[0] != "heavy"


def test_a_stage_without_profile_is_named():
    pipeline = a_ladder()
    with pytest.raises(PlanningError, match=r"^stage stage-0 has no profile; profile the pipeline first$"):
        initial_plan(pipeline, {})
    other = {stage.name: a_profile(stage.name, [a_point_profile("light", cores=3.0)]) for stage in pipeline.spec.stages}
    with pytest.raises(PlanningError, match="stage stage-0: its profile contains none of: light with 1 cores"):
        initial_plan(pipeline, other)


def test_a_gpu_that_the_budget_lacks_is_named():
    with pytest.raises(PlanningError, match=r"no plan fits budget.cores 4 and budget.gpus 0: .* raise the budget"):
        plan_for(a_ladder(variant={"resources": {"gpu": 1}}), 5.0)


def test_up_at_once_down_only_after_the_hold():
    loads = [(980.0, 100.0), (990.0, 40.0)]

    assert planning_load(150.0, loads, 100.0, 1000.0, 20.0) == 150.0
    assert planning_load(101.0, loads, 100.0, 1000.0, 20.0) == 101.0
    assert planning_load(10.0, loads, 100.0, 1000.0, 20.0) == 100.0
    assert planning_load(10.0, loads, 100.0, 1001.0, 20.0) == 40.0
    assert planning_load(10.0, [], 100.0, 1000.0, 20.0) == 10.0
    assert planning_load(0.0, [], None, 1000.0, 20.0) > 0


def test_a_rise_within_half_the_headroom_keeps_the_plan():
    assert planning_load(110.0, [], 100.0, 0.0, 20.0, headroom=0.2) == 100.0
    assert planning_load(111.0, [], 100.0, 0.0, 20.0, headroom=0.2) == 111.0


def test_a_drop_that_noise_explains_is_none():
    assert planning_load(80.0, [], 100.0, 0.0, 20.0) == 100.0
    assert drop_threshold(100.0) == pytest.approx(75.0)
    assert drop_threshold(36.0) == pytest.approx(21.0)
    assert drop_threshold(4.0) == pytest.approx(1.6)


@pytest.mark.parametrize("mean_rps", [2.0, 10.0, 30.0, 100.0, 400.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_constant_load_does_not_flap(mean_rps, seed):
    """100 ticks of Poisson noise: the plan settles and may then only grow, never go back and forth."""
    pipeline, plan, shapes = a_ladder(budget={"cores": "16"}), None, []
    peaks = np.random.default_rng(seed).poisson(mean_rps, (100, 20)).max(axis=1).astype(float)
    recent = [(10.0 * tick, peak) for tick, peak in enumerate(peaks)]
    for tick, (now, peak) in enumerate(recent):
        plan = plan_for(pipeline, peak, plan, now, recent[:tick])
        shapes.append(tuple((stage.variant, stage.replicas, stage.batch_size) for stage in plan.spec.stages))

    changes = sum(a != b for a, b in itertools.pairwise(shapes))
    assert changes <= 3
    assert len(set(shapes)) == changes + 1  # never back to an earlier plan


def test_hysteresis_keeps_a_plan_worth_less_than_the_switch():
    cheap, dear = a_ladder(), a_ladder(adaptation={"switchingCost": 100.0})
    before = plan_for(cheap, 200.0)

    assert plan_for(cheap, 5.0, before, now_seconds=9000.0).spec.generation == 2
    kept = plan_for(dear, 5.0, before, now_seconds=9000.0)
    assert kept.spec.generation == 1
    assert variants(kept) == variants(before)
    assert kept.spec.explanation.change.startswith("unchanged")


def test_a_branch_counts_the_slower_side():
    pipeline = a_ladder(stages=3)
    chain = plan_for(pipeline, 5.0)
    forked = plan_for(with_stage(pipeline, 2, inputs=[{"name": "x", "from": "stage-0.outputs.y"}]), 5.0)
    latencies = [stage.latency_seconds for stage in forked.spec.stages]

    assert expected(forked).latency_seconds == pytest.approx(latencies[0] + max(latencies[1:]))
    assert expected(chain).latency_seconds == pytest.approx(math.fsum(s.latency_seconds for s in chain.spec.stages))


@pytest.mark.parametrize(("cores", "counts"), [("1", True), ("500m", False)])
def test_idle_node_time_is_not_planned_as_capacity(cores, counts):
    pipeline = a_ladder(stages=1, variant={"resources": {"cpu": cores}}, budget={"cores": cores})
    profile = profiles_of(pipeline)["stage-0"]
    points = [point.replace(cores=float(parse_quantity(cores))) for point in profile.spec.points]
    problem = PlanningProblem(
        pipeline.spec, {"stage-0": a_profile("stage-0", points)}, 10.0, {}, {("stage-0", "light"): 0.5}
    )
    light = pipeline.spec.stages[0].variant("light")

    ratio = service_ratio(problem, pipeline.spec.stages[0], light, points[0])

    assert ratio == (0.5 if counts else 1.0)


@pytest.mark.parametrize(("newest", "expected_answer"), [(0.0, False), (100.0, False), (110.0, False), (112.0, True)])
def test_a_plan_is_outgrown_beyond_its_headroom(newest, expected_answer):
    assert outgrows(newest, planned_rps=100.0, headroom=0.1) is expected_answer


@pytest.mark.parametrize(("side", "largest"), [(1024, 15), (1200, 11), (2048, 3), (4000, 1)])
def test_planned_batches_fit_into_one_request(side, largest):
    """Rows of side × side FP32; a request holds 64 MiB, its own words included."""
    stage = a_stage(variants=[a_variant("light")], batchSizes=[1, 4, 8, 15, 16], pin={"replicas": 1})
    inputs = [{"name": "x", "datatype": "FP32", "shape": [side, side]}]
    pipeline = a_pipeline([stage], inputs=inputs, objective={"batchWeight": 0}, slo={"latency": "60s"})
    problem = PlanningProblem(pipeline.spec, profiles_of(pipeline), 1.0)
    sizes = {option.batch_size for option in build_program(problem).stages[0].options}

    assert sizes == {size for size in (1, 4, 8, 15, 16) if size <= largest}


def test_a_row_that_no_replica_takes_is_named():
    stage = a_stage(variants=[a_variant("light")])
    pipeline = a_pipeline([stage], inputs=[{"name": "x", "datatype": "FP64", "shape": [8 * 2**20]}])
    with pytest.raises(PlanningError, match="stage first: one row of its inputs exceeds the 67108864 bytes"):
        plan_for(pipeline, 1.0)


def test_rows_of_unknown_size_and_containers_bound_nothing():
    own = {"name": "light", "accuracy": 0.9, "container": {"image": "triton:1"}}
    for variant, shape in ((a_variant("light"), [-1, 2**26]), (own, [2**26])):
        stage = a_stage(variants=[variant], batchSizes=[1, 4])
        pipeline = a_pipeline([stage], inputs=[{"name": "x", "datatype": "FP32", "shape": shape}])
        options = build_program(PlanningProblem(pipeline.spec, profiles_of(pipeline), 1.0)).stages[0].options
        assert {option.batch_size for option in options} == {1, 4}


@pytest.mark.parametrize(
    ("forecast", "load", "planned", "words"),
    [
        (20.0, 20.0, None, ""),
        (0.0, MIN_LOAD_RPS, 30.0, ""),
        (2.0, 30.0, 30.0, "a peak counts for 10 s; the forecast is 2 now"),
        (28.0, 30.0, 30.0, "the forecast of 28 is not clearly lower"),
        (32.0, 30.0, 30.0, "the headroom carries the forecast of 32"),
    ],
)
def test_another_load_than_was_forecast_has_its_reason(forecast, load, planned, words):
    assert load_hold_reason(forecast, load, planned, 10.0) == words


ON_CPU = a_profile("stage-0", [a_point_profile("cpu-small", 0.002, 0.010), a_point_profile("cpu-large", 0.010, 0.080)])
ON_GPU = a_profile("stage-0", [a_point_profile("gpu-large", 0.001, 0.001)])


def plan_with(gpus):
    chain = a_chain(1)
    chain[0]["variants"] = [
        a_variant("cpu-small", accuracy=0.8),
        a_variant("cpu-large", accuracy=0.95),
        a_variant("gpu-large", accuracy=0.95, resources={"cpu": 1, "gpu": 1}, nodeSelector={"accelerator": "h200"}),
    ]
    fields = {"flavors": [{"name": "default", "prices": {"device": 2}}], "slo": {"latency": "400ms"}}
    pipeline = a_pipeline(chain, budget={"cores": "6", "gpus": gpus}, **fields)
    return initial_plan(pipeline, profiles_by_stage([ON_CPU, ON_GPU]), 100.0)


def test_gpu_is_used_only_within_the_budget():
    without, with_one = plan_with(0), plan_with(1)

    assert without.spec.stages[0].variant == "cpu-small"
    assert expected(without).gpus == 0
    assert with_one.spec.stages[0].variant == "gpu-large"
    assert expected(with_one).gpus == 1
    assert without.spec.explanation.binding_constraint.startswith("budget.gpus: without it the objective would gain")


def test_routers_follow_load_and_cpu_time():
    idle = plan_for(a_ladder(), 10.0)
    assert idle.spec.routers == 1

    busy = plan_for(a_ladder(), 100.0, idle, router_cpu_seconds=0.010)
    assert (busy.spec.routers, busy.spec.generation) == (2, idle.spec.generation + 1)
    assert "routers: 1 → 2" in busy.spec.explanation.change

    assert plan_for(a_ladder(), 100.0, busy).spec.routers == 2  # unmeasured: the number stays
    assert plan_for(a_ladder(), 1000.0, busy, router_cpu_seconds=0.010).spec.routers == 8  # maxReplicas


@pytest.mark.parametrize(("load_rps", "routers"), [(190.0, 4), (150.0, 3), (110.0, 3), (100.0, 2), (0.1, 1)])
def test_router_is_released_with_a_margin(load_rps, routers):
    assert required_routers(RouterSettings(), load_rps, 0.010, current=3) == routers
