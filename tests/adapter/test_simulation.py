"""The simulator: exact where it can be computed by hand, lawful where chance plays, and true to the router's rules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapter.scenes import a_ladder, profiles_of
from tests.builders import a_chain, a_pipeline, a_plan, a_point_profile, a_profile, a_variant
from trimtab_adapter.controller import Controller
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.simulation.environment import Environment, Failure, MachineSpeed
from trimtab_adapter.simulation.sampling import FanOut, interpolate_latency, rounding_weights
from trimtab_adapter.simulation.simulator import Scenario, forecaster_of, simulate
from trimtab_pipelines.profile import PointProfile
from trimtab_pipelines.request_outcome import DROPPED, FAILED, LATE, OK, REFUSED, RequestOutcome
from trimtab_predictor.forecaster import ReactiveForecaster
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies.interface import Dispatch, Policy
from trimtab_router.scheduling.stage_request import EscalationRule

EXACT = Environment(spread=0.0)


def a_scenario(pipeline=None, arrivals=(1.0,), duration=10.0, plan=None, **changes):
    """One stage of 6 ms at batch 1 and 4 + 2·b ms at batch b by default."""
    pipeline = pipeline or a_pipeline()
    profiles = changes.pop("profiles", None) or {
        stage.name: a_profile(stage.name, [a_point_profile(v.name) for v in stage.variants])
        for stage in pipeline.spec.stages
    }
    return Scenario(
        pipeline=pipeline,
        profiles=profiles,
        arrivals_seconds=np.asarray(arrivals, dtype=np.float64),
        duration_seconds=duration,
        plan=plan or a_plan(pipeline),
        environment=changes.pop("environment", EXACT),
        **changes,
    )


def poisson(rate, seconds, seed=0):
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def served_by(found, start, end):
    """Variants of the first stage that served requests which arrived between two moments."""
    pairs = zip(found.variants, found.arrivals_seconds, strict=True)
    return {variants["stage-0"] for variants, at in pairs if start < at < end and variants}


def test_a_lone_request_takes_its_service_time_in_each_stage():
    found = simulate(a_scenario(a_pipeline(3)))

    assert found.outcomes.tolist() == [OK]
    assert found.latency_seconds[0] == pytest.approx(3 * 0.006)
    assert found.accuracy[0] == pytest.approx(0.9**3)


def test_overheads_lie_around_the_batches():
    found = simulate(a_scenario(environment=replace(EXACT, before_seconds=0.002)))

    assert found.latency_seconds[0] == pytest.approx(0.006 + 0.002)


def test_busy_replicas_slow_a_batch():
    two = a_plan(a_pipeline(), replicas=2)
    environment = replace(EXACT, contention=0.5, failures=(Failure(4.001, "stage-0"),))
    found = simulate(a_scenario(arrivals=(1.0, 1.001, 3.0, 4.0, 6.0), plan=two, environment=environment))

    # Side by side; alone; lost with its replica and begun anew on the other; alone again.
    assert found.latency_seconds == pytest.approx([0.006, 0.009, 0.006, 0.001 + 0.006, 0.006], abs=1e-6)


def test_processor_pause_delays_only_its_own_batches():
    """Replicas take turns with the processors: the second one's sleeps from 1.003 to 1.103 and is half as fast then."""
    two = a_plan(a_pipeline(), replicas=2)
    speeds = (MachineSpeed((0.0,), (1.0,)), MachineSpeed((0.0, 1.003, 1.103), (1.0, 0.0, 0.5)))
    found = simulate(a_scenario(arrivals=(1.0, 1.001), plan=two, environment=replace(EXACT, speeds=speeds)))

    assert found.latency_seconds == pytest.approx([0.006, 0.002 + 0.100 + 2 * 0.004], abs=1e-6)


def test_measured_factors_replace_the_profile_spread():
    environment = Environment(factors={("stage-0", "small"): (0.5, 3.0)}, service_ratios={("stage-0", "small"): 2.0})
    found = simulate(
        a_scenario(arrivals=np.arange(0.1, 9.0, 0.1), profiles=a_wide_profile(3.0), environment=environment)
    )

    slow = found.latency_seconds > 0.010
    assert 0.3 < slow.mean() < 0.7
    assert found.latency_seconds == pytest.approx(np.where(slow, 3.0, 0.5) * 2 * 0.006)


def test_batch_sizes_have_ratios_besides_their_variant():
    """The first alone, 6 ms; then three together, 4 + 2·3 ms, twice as long: between sizes 1 and 4 lies a line."""
    environment = replace(EXACT, size_ratios={("stage-0", "small"): {1: 1.0, 4: 2.5}})
    found = simulate(a_scenario(arrivals=(1.0, 1.001, 1.002, 1.003), environment=environment))

    assert found.latency_seconds == pytest.approx([0.006, 0.006 + 0.020 - 0.001, 0.024, 0.023], abs=1e-6)


def test_rows_arriving_at_a_busy_replica_form_one_batch():
    found = simulate(a_scenario(arrivals=(1.0, 1.001, 1.002, 1.003)))

    # The first alone, 6 ms; the three that came meanwhile together, 4 + 2·3 ms, from its end on.
    assert found.latency_seconds == pytest.approx([0.006, 0.006 + 0.010 - 0.001, 0.014, 0.013], abs=1e-6)
    assert found.batch_rows["stage-0"] == 2.0


def test_a_single_server_waits_as_queueing_theory_says():
    """M/D/1 at ρ = 0.6, batch 1: the mean wait is ρ·s / (2(1 − ρ)) = 0.75 s."""
    pipeline = a_pipeline()
    found = simulate(a_scenario(pipeline, poisson(100, 60), 60.0, plan=a_plan(pipeline, batchSize=1)))

    assert found.violations == 0.0
    assert found.latency_seconds.mean() == pytest.approx(0.006 * (1 + 0.75), rel=0.1)


def a_wide_profile(p99_over_median):
    """The stage's usual profile, but with a p99 so many times the median."""
    point = a_point_profile()
    wide = [m.replace(latency_seconds_p99=p99_over_median * m.latency_seconds_p50) for m in point.measurements]
    return {"stage-0": a_profile("stage-0", [PointProfile(variant="small", cores=1, measurements=wide, fit=point.fit)])}


def test_service_times_spread_between_median_and_p99():
    arrivals = np.arange(1, 2001) * 0.1
    found = simulate(
        a_scenario(arrivals=arrivals, duration=201.0, profiles=a_wide_profile(2.0), environment=Environment())
    )

    assert found.latency(0.5) == pytest.approx(0.006, rel=0.03)
    assert found.latency(0.99) == pytest.approx(0.012, rel=0.1)


def test_the_same_seed_gives_the_same_result_and_another_another():
    scenario = a_scenario(arrivals=poisson(60, 10), profiles=a_wide_profile(1.5), environment=Environment())
    one, again, other = (simulate(replace(scenario, seed=seed)) for seed in (1, 1, 2))

    assert np.array_equal(one.latency_seconds, again.latency_seconds)
    assert not np.array_equal(one.latency_seconds, other.latency_seconds)


def test_every_request_has_exactly_one_end_even_in_overload():
    found = simulate(a_scenario(a_pipeline(2), poisson(1500, 20), 20.0))

    assert found.outcomes.size == found.seconds[-1].received
    assert sum(found.share(end) for end in RequestOutcome) == pytest.approx(1.0)
    assert 0.2 < found.share(DROPPED) < 0.9
    assert found.share(LATE) < 0.02
    assert all(reason in {"DeadlineUnreachable", "DeadlineExpired"} for _, reason in found.reasons.values())


def decide_with_escalation(view):
    head = next(iter(view.waiting))
    return Dispatch(view.points[0], view.candidates(head, view.points[0]).first(8), escalation=EscalationRule(0.0, "-"))


@pytest.mark.parametrize("policy", [None, Policy(decide_with_escalation)])
def test_fan_out_multiplies_rows_and_joins_before_the_answer(policy):
    chain = a_chain(2)
    chain[0]["outputs"] = [
        {"name": "n", "datatype": "INT64"},
        {"name": "y", "datatype": "FP32", "shape": [4], "countedBy": "n", "expectedRows": 2},
        {"name": "sure", "datatype": "FP32"},
    ]
    chain[0]["confidence"] = "sure"
    pipeline = a_pipeline(chain)
    environment = replace(EXACT, fan_out={("stage-0", "n"): (0.0, 0.0, 0.0, 1.0)})
    found = simulate(a_scenario(pipeline, environment=environment, policy=policy))

    assert found.latency_seconds[0] == pytest.approx(0.006 + 0.010)  # three rows in one batch of 4 + 2·3 ms
    assert found.batch_rows["stage-1"] == 3.0


@pytest.mark.parametrize("mean", [0.5, 1.0, 2.0, 2.3])
def test_an_expected_fan_out_is_met_on_average(mean):
    draws = FanOut(rounding_weights(mean), np.random.default_rng(0))

    assert np.mean(draws.draw(8000)) == pytest.approx(mean, abs=0.03)


def test_between_profiled_sizes_a_batch_takes_what_lies_between():
    assert interpolate_latency(a_point_profile(), 3, 0.5) == pytest.approx(0.010)
    assert interpolate_latency(a_point_profile(), 64, 0.5) == pytest.approx(0.132)


def heavy_and_light(**changes):
    """One stage whose variants ask for different resources, so that a change starts replicas."""
    chain = a_chain(1)
    chain[0]["variants"] = [
        a_variant("light", accuracy=0.8, resources={"cpu": "1"}),
        a_variant("heavy", accuracy=0.9, resources={"cpu": "2"}),
    ]
    pipeline = a_pipeline(chain, **changes)
    points = [a_point_profile("light"), a_point_profile("heavy", cores=2.0)]
    return pipeline, {"stage-0": a_profile("stage-0", points)}


def test_a_plan_becomes_true_make_before_break():
    pipeline, profiles = heavy_and_light()
    light, heavy = a_plan(pipeline), a_plan(pipeline, 2, variant="heavy", accuracy=0.9, cores=2)
    scenario = a_scenario(
        pipeline, poisson(20, 30), 30.0, light, profiles=profiles, changes=((10.0, heavy),), environment=EXACT
    )
    found = simulate(scenario)
    cores = [second.cores for second in found.seconds]

    assert found.violations == 0.0
    assert cores[9] == 1.0
    assert cores[11:17] == [3.0] * 6  # both, while the heavy one starts
    assert cores[19] == 2.0
    assert served_by(found, 0.0, 17.9) == {"light"}
    assert served_by(found, 18.1, 30.0) == {"heavy"}
    assert found.starts == 1


def test_within_a_hosting_group_a_change_starts_nothing():
    pipeline = a_ladder()
    plans = [a_plan(pipeline, n, variant=variant) for n, variant in ((1, "light"), (2, "heavy"))]
    scenario = a_scenario(
        pipeline, poisson(5, 20), 20.0, plans[0], profiles=profiles_of(pipeline), changes=((10.0, plans[1]),)
    )
    found = simulate(scenario)

    assert found.starts == 0
    assert found.seconds[11].stages["stage-0"][0] == "heavy"


def test_a_lost_replica_loses_no_request_where_there_is_another():
    pipeline = a_pipeline()
    environment = replace(EXACT, failures=(Failure(10.0, "stage-0"),), startup_seconds=3.0)
    found = simulate(
        a_scenario(pipeline, poisson(100, 20), 20.0, a_plan(pipeline, replicas=2), environment=environment)
    )

    assert found.violations == 0.0
    assert [found.seconds[n].stages["stage-0"][2] for n in (9, 11, 14)] == [2, 1, 2]
    assert found.starts == 1


def test_requests_without_replicas_wait_until_they_are_dropped():
    environment = replace(EXACT, failures=(Failure(10.0, "stage-0"),), startup_seconds=3.0)
    found = simulate(a_scenario(arrivals=poisson(20, 20), duration=20.0, environment=environment))
    lost = found.arrivals_seconds[found.outcomes != OK]

    assert lost.size > 0
    assert lost.min() > 9.4
    assert lost.max() < 13.1


def test_the_slow_loop_follows_the_load():
    pipeline = a_ladder(adaptation={"interval": "5s", "scaleDownStabilization": "10s", "forecaster": "Oracle"})
    profiles = profiles_of(pipeline)
    arrivals = np.concatenate([poisson(5, 60), 60 + poisson(120, 60, 1), 120 + poisson(5, 60, 2)])
    knowing = forecaster_of(pipeline.spec.adaptation, arrivals, 180, 0.0)
    scenario = a_scenario(
        pipeline,
        arrivals,
        180.0,
        initial_plan(pipeline, profiles),
        profiles=profiles,
        controller=Controller(knowing),
        environment=replace(EXACT, startup_seconds=2.0),
    )
    found = simulate(scenario)

    assert served_by(found, 70.0, 110.0) != served_by(found, 160.0, 180.0)
    assert found.violations < 0.02
    assert max(second.cores for second in found.seconds) <= 4.0


def test_a_load_that_outgrows_the_plan_brings_a_decision_forward():
    pipeline = a_ladder(adaptation={"interval": "30s"})
    profiles = profiles_of(pipeline)
    arrivals = np.concatenate([poisson(2, 20), 20 + poisson(80, 5, 1)])
    scenario = a_scenario(
        pipeline,
        arrivals,
        25.0,
        initial_plan(pipeline, profiles, 3.0),
        profiles=profiles,
        controller=Controller(ReactiveForecaster()),
    )
    times = [plan.spec.created_at for plan in simulate(scenario).plans]

    assert any(20.0 < at < 23.0 for at in times)


def test_never_with_a_backlog_fails_no_request():
    pipeline = a_pipeline(dropPolicy="Never", queue={"maxRows": 100000})
    found = simulate(a_scenario(pipeline, poisson(250, 60), 60.0, a_plan(pipeline, batchSize=1)))

    assert found.latency_seconds.max() > 20.0  # which is far beyond the load's end and any promise
    assert (found.outcomes <= LATE).all()
    assert not found.reasons


def test_backlog_beyond_ten_durations_is_reported_unanswered():
    pipeline = a_pipeline(dropPolicy="Never", queue={"maxRows": 100000})
    found = simulate(a_scenario(pipeline, poisson(9000, 1), 1.0, a_plan(pipeline, batchSize=1)))

    given_up = np.flatnonzero(found.outcomes == FAILED)
    assert found.share(LATE) > 0.2
    assert given_up.size > 0
    assert {found.reasons[index] for index in given_up.tolist()} == {("", "Backlog")}


def test_who_wishes_what_no_plan_can_give_is_no_load_to_plan_for():
    pipeline = a_ladder(adaptation={"interval": "5s"})
    profiles = profiles_of(pipeline)
    scenario = a_scenario(
        pipeline,
        poisson(40, 20),
        20.0,
        initial_plan(pipeline, profiles, 3.0),
        profiles=profiles,
        controller=Controller(ReactiveForecaster()),
        options=(RequestOptions(task="unheard-of"),),
    )
    found = simulate(scenario)

    assert found.share(REFUSED) == 1.0
    forecasts = [plan.spec.forecast for plan in found.plans[1:]]
    assert max(forecast.peak_rps for forecast in forecasts if forecast is not None) < 1.0


@pytest.mark.parametrize(
    ("since", "speeds"),
    [((), ()), ((0.0,), (1.0, 2.0)), ((0.0, 0.0), (1.0, 1.0)), ((0.0, 1.0), (-1.0, 1.0)), ((0.0, 1.0), (1.0, 0.0))],
)
def test_a_speed_that_cannot_be_is_refused(since, speeds):
    with pytest.raises(ValueError, match="a processor's speed needs"):
        MachineSpeed(since, speeds)


SPEEDS = st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.0)), min_size=1, max_size=8)


@given(SPEEDS, st.floats(-2, 12), st.floats(0, 10), st.floats(0, 10))
def test_work_done_in_two_parts_ends_as_if_done_in_one(speeds, begin, first, second):
    speed = MachineSpeed(tuple(range(len(speeds) + 1)), (*speeds, 1.0))

    halfway = speed.finish(begin, first)
    assert begin <= halfway <= speed.finish(begin, first + second) + 1e-9
    assert speed.finish(halfway, second) == pytest.approx(speed.finish(begin, first + second), abs=1e-6)
    grid = np.arange(begin, speed.finish(begin, first), 0.001)
    at = np.clip(np.floor(grid).astype(int), 0, len(speeds))
    assert np.array([*speeds, 1.0])[at].sum() * 0.001 == pytest.approx(first, abs=0.01)
