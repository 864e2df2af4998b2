"""Plans and schedules of stages that run two replica groups at once, in a queue that both serve."""

import numpy as np
import pytest

from tests.adapter.problems import a_hosting_problem, brute_force
from tests.adapter.scenes import a_ladder, plan_for, profiles_of, with_stage
from tests.adapter.test_hosted_variants import MAX_ACCURACY, OUTPUTS, a_step, keys
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_adapter.planning.program_builder import build_program
from trimtab_adapter.simulation.environment import Environment, Failure
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_adapter.solvers import exact
from trimtab_pipelines.documents import DocumentError, accept_plan
from trimtab_pipelines.plan import ReplicaGroupPlan
from trimtab_pipelines.request_outcome import LATE, OK
from trimtab_pipelines.row_shares import describe_shares


def a_dedicated_ladder(cores=2, stages=1, **changes):
    """A ladder each of whose variants has replicas of its own, and whose queues several groups may serve."""
    fields = {"schedulingPolicy": "TokenAdaptive", "objective": MAX_ACCURACY, "budget": {"cores": str(cores)}}
    pipeline = a_ladder(stages, **fields | changes)
    for index in range(stages):
        pipeline = with_stage(pipeline, index, variantPlacement="Dedicated")
    return pipeline


def test_two_groups_are_planned_if_one_is_too_slow():
    """A core carries 47 rows a second of the heavy variant, and 186 of the middle one."""
    pipeline = a_dedicated_ladder()
    calm, busy, busiest = (plan_for(pipeline, load).spec.stages[0] for load in (40.0, 90.0, 250.0))

    assert [describe_option(stage) for stage in (calm, busy, busiest)] == [
        "heavy ×2 batch 4",
        "heavy ×1 + middle ×1 batch 8",
        "middle ×2 batch 32",
    ]
    assert keys(busy) == [("heavy", "default"), ("middle", "default")]
    assert (busy.all_replicas, busy.all_cores) == (2, 2.0)
    assert busy.mixed_accuracy == busy.expected_accuracy
    assert describe_shares(busy.expected_rows) == "54 % middle, 46 % heavy"
    assert 0.9 < busy.expected_accuracy < 0.97


def test_plan_of_two_groups_stays_while_the_load_does():
    pipeline = a_dedicated_ladder()
    plan = plan_for(pipeline, 90.0)

    assert plan_for(pipeline, 91.0, plan).spec.generation == plan.spec.generation
    assert plan_for(pipeline, 250.0, plan).spec.generation == plan.spec.generation + 1


def test_policy_without_mixes_plans_one_group():
    assert not plan_for(a_dedicated_ladder(schedulingPolicy="SlackFit"), 90.0).spec.stages[0].other_groups


@pytest.mark.parametrize(("floor", "described"), [(0.9, "middle ×1 batch 16"), (0.92, "heavy ×1 + middle ×1 batch 4")])
def test_fewest_cores_of_two_groups_keep_the_accuracy_floor(floor, described):
    goal = {"goal": "MinCost", "accuracyFloor": floor}
    spec = plan_for(a_dedicated_ladder(8, objective=goal), 90.0).spec

    assert describe_option(spec.stages[0]) == described
    assert spec.stages[0].expected_accuracy >= floor
    assert "middle" in {key[0] for key in keys(spec.stages[0])}


@pytest.mark.parametrize("pin", [{"replicas": 2}, {"variant": "middle"}])
def test_pin_plans_one_group(pin):
    assert not plan_for(with_stage(a_dedicated_ladder(), 0, pin=pin), 90.0).spec.stages[0].other_groups


def test_exact_solver_equals_brute_force_with_groups():
    mixed = cascades = 0
    for seed in range(300):
        program = build_program(a_hosting_problem(seed, stages=2, variants=3, sizes=(1, 4, 16), grouped=True))
        best, found = brute_force(program), exact.solve(program)
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert found.objective == pytest.approx(program.objective(best), abs=1e-9)
            grouped = [option for option in best if option.other_groups]
            mixed += any(option.mixed for option in grouped)
            cascades += any(not option.mixed for option in grouped)

    assert min(mixed, cascades) > 10


def simulated(pipeline, plan, arrivals, seconds, seed=0, **environment):
    scenario = Scenario(
        pipeline, profiles_of(pipeline), arrivals, seconds, plan, seed=seed, environment=Environment(**environment)
    )
    return simulate(scenario)


@pytest.mark.parametrize(("cores", "load_rps"), [(2, 90.0), (3, 150.0), (4, 150.0)])
def test_served_accuracy_is_at_least_the_promised_one(cores, load_rps):
    pipeline = a_dedicated_ladder(cores)
    plan = plan_for(pipeline, load_rps)
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0, 8.0, rng.poisson(8.0 * sustained_load_rps(1.1 * load_rps, 20.0))))
    result = simulated(pipeline, plan, arrivals, 8.0)

    assert plan.spec.stages[0].other_groups
    assert result.share(OK) == 1.0
    assert -0.002 < np.nanmean(result.accuracy) - plan.spec.stages[0].expected_accuracy < 0.02


@pytest.mark.parametrize("phase", range(5))
def test_step_of_four_drops_none_if_the_lighter_group_carries_it(phase):
    pipeline = a_dedicated_ladder(4, stages=2)
    plan = plan_for(pipeline, 70.0)
    result = simulated(pipeline, plan, a_step(40.0, 2.0 + 0.1 * phase, seed=phase), 6.0, seed=phase)

    assert all(stage.other_groups for stage in plan.spec.stages)
    assert result.share(OK) + result.share(LATE) == 1.0
    assert result.share(LATE) <= 0.005


@pytest.mark.parametrize("seed", range(3))
def test_lighter_group_serves_what_a_lost_replica_leaves(seed):
    pipeline = a_dedicated_ladder()
    plan, failures = plan_for(pipeline, 90.0), (Failure(2.0, "stage-0"),)
    arrivals = np.sort(np.random.default_rng(seed).uniform(0, 5.0, 300))
    result = simulated(pipeline, plan, arrivals, 5.0, seed=seed, startup_seconds=1.0, failures=failures)

    assert result.share(OK) == 1.0
    assert result.starts == 1


def test_rollout_to_two_groups_drops_none():
    pipeline = a_dedicated_ladder(3)
    plans = [plan_for(pipeline, 90.0), plan_for(pipeline, 150.0), plan_for(pipeline, 90.0)]
    arrivals = np.sort(np.random.default_rng(0).uniform(0, 8.0, 880))
    scenario = Scenario(
        pipeline,
        profiles_of(pipeline),
        arrivals,
        8.0,
        plans[0],
        changes=((2.0, plans[1]), (5.0, plans[2])),
        environment=Environment(startup_seconds=0.5),
    )
    result = simulate(scenario)

    assert [describe_option(plan.spec.stages[0]) for plan in plans[:2]] == [
        "heavy ×3 batch 4",
        "heavy ×2 + middle ×1 batch 8",
    ]
    assert result.share(OK) == 1.0
    assert {key[0] for key in result.rows_by_point["stage-0"]} == {"heavy", "middle"}


def test_plan_of_two_groups_fits_its_pipeline_and_budget():
    pipeline = a_dedicated_ladder()
    plan, hosting = plan_for(pipeline, 90.0), with_stage(pipeline, 0, variantPlacement="Shared")

    assert accept_plan(plan, pipeline) is plan
    with pytest.raises(DocumentError, match="otherGroups"):
        accept_plan(plan, hosting)
    more = (ReplicaGroupPlan(variant="middle", replicas=2),)
    stage = plan.spec.stages[0].replace(other_groups=more)
    larger = plan.with_spec(stages=(stage,))
    with pytest.raises(DocumentError, match="budget"):
        accept_plan(larger, pipeline)


def a_split_ladder(cores=2, first=1, share=0.1, accuracy=0.975, **changes):
    """A dedicated ladder whose variant number `first` escalates low-confidence rows to the heavy one."""
    look = {"to": "default", "variant": "heavy", "confidenceBelow": 0.6, "share": share, "accuracy": accuracy}
    pipeline = a_dedicated_ladder(cores, **changes)
    variants = [variant.model_dump(by_alias=True) for variant in pipeline.spec.stages[0].variants]
    variants[first]["escalations"] = [look]
    return with_stage(pipeline, 0, variants=variants, outputs=OUTPUTS, confidence="sure")


def test_second_group_serves_escalated_rows():
    pipeline = a_split_ladder(3)
    plan = plan_for(pipeline, 150.0)
    stage = plan.spec.stages[0]
    result = simulated(pipeline, plan, np.sort(np.random.default_rng(0).uniform(0, 6.0, 850)), 6.0)

    assert describe_option(stage) == "middle, 10 % escalated to heavy ×2 + heavy ×1 batch 16"
    assert describe_shares(stage.expected_rows) == "90 % middle, 10 % escalated to heavy"
    assert (stage.second_pass_group, stage.expected_accuracy) == ("heavy", 0.975)
    assert plan_for(pipeline, 152.0, plan).spec.generation == plan.spec.generation
    assert result.share(OK) == 1.0
    assert result.rows_by_point["stage-0"] == {
        ("middle", "default"): 850,
        ("heavy", "default"): result.escalated_rows["stage-0"],
    }
    assert np.nanmean(result.accuracy) == pytest.approx(0.975, abs=0.002)


@pytest.mark.parametrize("seed", [0, 7])
def test_either_group_serves_if_the_other_is_lost(seed):
    """The replica with the most batches is lost among escalations, and its successor starts after the last request."""
    pipeline = a_split_ladder(2, first=0, share=0.3, accuracy=0.95)
    plan, failures = plan_for(pipeline, 90.0), (Failure(2.0 + 0.01 * seed, "stage-0"),)
    arrivals = np.sort(np.random.default_rng(seed).uniform(0, 4.0, 120))
    result = simulated(pipeline, plan, arrivals, 4.0, startup_seconds=9.0, failures=failures)

    assert plan.spec.stages[0].second_pass_group == "heavy"
    assert result.starts == 1
    assert result.share(OK) == 1.0
    assert result.unescalated.any() or result.rows_by_point["stage-0"]["heavy", "default"] > 60


def test_overload_of_the_second_group_delays_no_response():
    pipeline = a_split_ladder(2, first=0, share=0.3, accuracy=0.95)
    plan = plan_for(pipeline, 90.0)
    result = simulated(pipeline, plan, a_step(60.0, 2.0), 6.0)

    assert describe_option(plan.spec.stages[0]) == "light, 30 % escalated to heavy ×1 + heavy ×1 batch 16"
    assert result.share(OK) + result.share(LATE) == 1.0
    assert result.share(LATE) <= 0.005
    assert result.unescalated.any()
