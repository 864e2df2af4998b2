"""Plans of stages whose replicas host several variants: points, capacity, cascades, floors, and bursts."""

import numpy as np
import pytest

from tests.adapter.problems import a_hosting_problem, brute_force
from tests.adapter.scenes import a_ladder, plan_for, profiles_of, with_stage
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_adapter.solvers import exact
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_pipelines.row_shares import AnsweredBy, describe_shares

OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "sure", "datatype": "FP32"}]
HEAVY_LOOK = {"to": "default", "variant": "heavy", "confidenceBelow": 0.6, "share": 0.1, "accuracy": 0.975}
MAX_ACCURACY = {"goal": "MaxAccuracy"}


def a_hosting_ladder(stages=1, **changes):
    """A ladder whose policy follows from its variants."""
    return a_ladder(stages, **{"schedulingPolicy": None, "objective": MAX_ACCURACY, "budget": {"cores": "1"}} | changes)


def keys(stage):
    return [point.key(stage.variant) for point in stage.points]


def test_hosted_variants_select_the_adaptive_policy():
    shared, pinned = a_hosting_ladder(), a_hosting_ladder(variant={"resources": {"cpu": 1}})

    assert shared.spec.policy_name == "TokenAdaptive"
    assert with_stage(pinned, 0, pin={"variant": "light"}).spec.policy_name == "EarliestDeadlineFirst"
    assert with_stage(shared, 0, variantPlacement="Dedicated").spec.policy_name == "EarliestDeadlineFirst"
    assert a_hosting_ladder(schedulingPolicy="SlackFit").spec.policy_name == "SlackFit"


def test_points_of_all_hosted_variants_are_allowed():
    stage = plan_for(a_hosting_ladder(), 5.0).spec.stages[0]

    assert keys(stage) == [("heavy", "default"), ("middle", "default"), ("light", "default")]
    assert stage.planned.variant is None
    assert keys(plan_for(a_hosting_ladder(schedulingPolicy="EarliestDeadlineFirst"), 5.0).spec.stages[0])[1:] == []


@pytest.mark.parametrize(
    ("changes", "is_larger"),
    [({}, True), ({"schedulingPolicy": "EarliestDeadlineFirst"}, False), ({"objective": {"batchWeight": 0.1}}, False)],
)
def test_fallbacks_allow_larger_batches_than_planned(changes: dict[str, object], *, is_larger: bool) -> None:
    plan = plan_for(a_hosting_ladder(**changes), 5.0).spec.stages[0]
    largest = plan.max_batch_size

    assert (largest is not None) is is_larger
    if largest is not None:
        assert largest > plan.batch_size
        light = plan.points[-1].service_seconds
        assert 2.0 * light[largest] <= plan.latency_seconds


@pytest.mark.parametrize(("side", "largest"), [(4, 16), (2100, 3)])
def test_larger_batches_fit_into_one_request(side: int, largest: int) -> None:
    """Rows of side × side FP32; a request holds 64 MiB, which are three rows of 17 MB."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": [side, side]}]
    pipeline = a_hosting_ladder(inputs=inputs, slo={"latency": "60s"})
    plan = plan_for(with_stage(pipeline, 0, batchSizes=[1, 2, 3, 4, 16]), 5.0).spec.stages[0]

    assert plan.largest_batch == largest


def test_variant_with_too_small_batches_is_not_allowed():
    pipeline = a_hosting_ladder()
    variants = [v.model_dump(by_alias=True) for v in pipeline.spec.stages[0].variants]
    variants[0]["maxBatchSize"] = 2
    stage = plan_for(with_stage(pipeline, 0, variants=variants, pin={"batchSize": 8}), 5.0).spec.stages[0]

    assert ("light", "default") not in keys(stage)


def test_pinned_variant_excludes_the_others():
    stage = plan_for(with_stage(a_hosting_ladder(), 0, pin={"variant": "middle"}), 5.0).spec.stages[0]

    assert keys(stage) == [("middle", "default")]


def test_lightest_hosted_variant_carries_the_busiest_second():
    adaptive = plan_for(a_hosting_ladder(budget={"cores": "64"}), 300.0).spec.stages[0]
    alone = plan_for(a_hosting_ladder(budget={"cores": "64"}, schedulingPolicy="EarliestDeadlineFirst"), 300.0)

    assert adaptive.replicas < alone.spec.stages[0].replicas
    assert adaptive.throughput_rps > 10 * alone.spec.stages[0].throughput_rps


def test_cascade_to_another_variant_is_planned():
    pipeline = a_hosting_ladder()
    variants = [v.model_dump(by_alias=True) for v in pipeline.spec.stages[0].variants]
    variants[1]["escalations"] = [HEAVY_LOOK]
    stage = plan_for(with_stage(pipeline, 0, variants=variants, outputs=OUTPUTS, confidence="sure"), 60.0).spec.stages[
        0
    ]

    assert (stage.variant, str(stage.planned_escalation)) == ("middle", "10 % escalated to heavy")
    assert stage.expected_accuracy == pytest.approx(0.975)
    assert describe_shares(stage.expected_rows) == "90 % middle, 10 % escalated to heavy"
    assert ("heavy", "default") in keys(stage)


@pytest.mark.parametrize(("floor", "allowed"), [(0.7, {"light", "middle"}), (0.85, {"middle"}), (0.92, set())])
def test_fallbacks_of_other_variants_keep_the_floor(floor, allowed):
    goal = {"goal": "MaxAccuracy", "accuracyFloor": floor}
    stage = plan_for(a_hosting_ladder(2, objective=goal, budget={"cores": "2"}), 5.0).spec.stages[0]

    assert stage.variant == "heavy"
    assert {point.variant for point in stage.fallbacks} == allowed


def test_mix_serves_as_many_rows_at_the_heavier_variant_as_fit():
    """At batch 8 a core carries 47 rows a second of the heavy variant and 186 of the middle one."""
    plan = plan_for(a_hosting_ladder(), 60.0).spec
    stage, rows_rps = plan.stages[0], sustained_load_rps(1.1 * 60.0, 20.0)
    heavy, middle = (stage.points[n].service_seconds[8] / 8 for n in (0, 1))
    share = (0.8 / rows_rps - middle) / (heavy - middle)

    assert (stage.variant, stage.batch_size, stage.replicas) == ("heavy", 8, 1)
    assert stage.mixed_accuracy == pytest.approx(0.9 + share * 0.07, abs=1e-6)
    assert plan.expected is not None
    assert stage.mixed_accuracy == stage.expected_accuracy <= plan.expected.accuracy
    assert sum(stage.expected_rows.values()) == pytest.approx(1.0)
    assert stage.expected_rows[AnsweredBy("heavy", "default")] == pytest.approx(0.85 / 0.8 * share, abs=0.05)


def test_policy_without_mixes_plans_none():
    assert plan_for(a_hosting_ladder(schedulingPolicy="SlackFit"), 60.0).spec.stages[0].mixed_accuracy is None


@pytest.mark.parametrize(("floor", "cores"), [(0.91, 2.0), (0.95, 4.0), (0.97, 6.0)])
def test_fewest_cores_of_a_mix_keep_the_accuracy_floor(floor, cores):
    """At batch 8 a core carries 47 rows a second of the heavy variant (0.97) and 186 of the middle one (0.9)."""
    goal = {"goal": "MinCost", "accuracyFloor": floor}
    spec = plan_for(a_hosting_ladder(objective=goal, budget={"cores": "8"}), 180.0).spec
    stage = spec.stages[0]

    assert spec.feasible
    assert spec.expected is not None
    assert (stage.variant, spec.expected.cores) == ("heavy", cores)
    assert spec.expected.accuracy >= stage.expected_accuracy >= floor
    assert (stage.mixed_accuracy is None) == (floor == 0.97)
    assert ("middle" in {point.variant for point in stage.fallbacks}) == (floor < 0.97)


def test_exact_solver_equals_brute_force_with_mixes_and_cascades():
    mixed = cascades = 0
    for seed in range(500):
        program = build_program(a_hosting_problem(seed, stages=2, variants=3, sizes=(1, 4, 16)))
        best, found = brute_force(program), exact.solve(program)
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert found.objective == pytest.approx(program.objective(best), abs=1e-9)
            mixed += any(option.mixed for option in best)
            cascades += any(option.planned_escalation is not None for option in best)

    assert min(mixed, cascades) > 50


def a_step(rps, at_seconds, seconds=6.0, seed=0):
    """Poisson arrivals that rise fourfold within a second."""
    rng = np.random.default_rng(seed)
    edges = np.arange(0.0, seconds, 0.05)
    rates = rps * np.interp(edges, [at_seconds, at_seconds + 1.0], [1.0, 4.0])
    counts = rng.poisson(0.05 * rates)
    return np.sort(np.repeat(edges, counts) + rng.uniform(0.0, 0.05, counts.sum()))


@pytest.mark.parametrize("phase", range(10))
def test_step_of_four_drops_none_while_the_heaviest_run(phase):
    pipeline = a_hosting_ladder(2, budget={"cores": "2"})
    plan = plan_for(pipeline, 20.0)
    arrivals = a_step(20.0, 2.0 + 0.1 * phase, seed=phase)
    result = simulate(Scenario(pipeline, profiles_of(pipeline), arrivals, 6.0, plan, seed=phase))

    assert {stage.variant for stage in plan.spec.stages} == {"heavy"}
    assert (plan.spec.stages[0].replicas, plan.spec.stages[1].replicas) == (1, 1)
    assert result.share(OK) + result.share(LATE) == 1.0
    assert result.share(LATE) <= 0.005
    assert len(result.rows_by_point["stage-0"]) > 1
