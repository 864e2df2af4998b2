"""Small decisions: service times, binding, operating points, and the plans that fit."""

import pytest

from tests.builders import a_pipeline, a_plan, a_stage, a_variant
from trimtab_pipelines.documents import DocumentError, accept_plan, validate_plan
from trimtab_router.scheduling.replica_selection import ReplicaSelection
from trimtab_router.scheduling.replica_slots import ReplicaSlots
from trimtab_router.scheduling.service_time import MAX_IDLE_DROPS, ServiceTimes, interpolate, wait_for_others

KEY = ("small", "default")


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01), (2, 0.02), (3, 0.025), (4, 0.03), (8, 0.06)])
def test_profile_is_interpolated_and_extrapolated(rows, seconds):
    assert interpolate([1, 2, 4], [0.01, 0.02, 0.03], rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("waited", "departed", "completed", "seconds"),
    [
        (0.0, 10.0, 9.0, 0.0),
        (0.040, 10.0, 9.0, 0.040),  # our batch before it was over: all was for another's
        (0.019, 10.0, 10.020, 0.0),  # sent ahead: it waited for our own batch
        (0.049, 10.0, 10.020, 0.030),  # sent ahead, and another's came in between
        (0.0005, 10.0, 9.0, 0.0),
    ],
)
def test_wait_for_other_routers_excludes_own_batches(waited, departed, completed, seconds):
    assert wait_for_others(waited, departed, completed, transfer_seconds=0.001) == pytest.approx(seconds, abs=1e-9)


def test_wait_for_other_routers_does_not_slow_the_profile():
    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.010})
    for _ in range(100):
        times.observe(KEY, 1, 0.010)
        times.wait.observe(0.020)

    assert times.ratio(KEY) == pytest.approx(1.0)
    assert times.predict(KEY, 1) == pytest.approx(0.030, rel=0.02)
    for _ in range(100):
        times.wait.observe(0.0)
    assert times.predict(KEY, 1) == pytest.approx(0.010, rel=0.02)


def test_concurrency_counts_up_to_the_profiled_size():
    times = ServiceTimes()
    for _ in range(50):
        times.observe(KEY, 1, 0.040, concurrent=3)
    assert times.predict(KEY, 1) == times.predict(KEY, 1, concurrent=9) == pytest.approx(0.040)

    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.010, 4: 0.040})
    for _ in range(50):
        times.observe(KEY, 1, 0.080, concurrent=3)
    assert times.ratio(KEY) == pytest.approx(2.0, rel=0.01)
    predicted = [times.predict(KEY, 1, concurrent=beside) for beside in (0, 1, 3, 9)]
    assert predicted == pytest.approx([0.020, 0.040, 0.080, 0.080], rel=0.05)


def test_recent_ratio_weighs_points_by_their_seconds():
    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.010})
    times.set_profile(("small", "half"), {1: 0.001})
    assert times.recent_ratio("small") is None
    for _ in range(200):
        times.observe(KEY, 1, 0.020)
        times.observe(("small", "half"), 1, 0.001)

    assert times.recent_ratio("small") == pytest.approx(21 / 11, rel=0.02)
    times.observe(KEY, 1, 5.0)  # a pause
    assert (times.recent_ratio("small") or 0.0) < 1.2 * 21 / 11
    assert times.recent_ratio("large") is None


def test_recent_ratio_is_of_seconds_not_of_batches():
    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.010})
    for batch in range(1000):  # of ten seconds, each a third or five thirds of the usual time
        times.observe(KEY, 1, 0.010 * (1 / 3 if batch % 20 < 10 else 5 / 3), now=0.01 * batch)
    assert times.recent_ratio("small") == pytest.approx(1.0, rel=0.02)
    assert times.ratio(KEY) > 1.3

    for batch in range(1000, 3000):  # a machine that is half as fast
        times.observe(KEY, 1, 0.020, now=0.01 * batch)
    assert times.recent_ratio("small") == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("new", [("large", "default"), ("small", "half")])
def test_key_that_never_ran_has_the_machine_ratio(new):
    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.010})
    for _ in range(60):
        times.observe(KEY, 1, 0.020)
    times.set_profile(new, {1: 0.100})

    assert times.predict(new, 1) == pytest.approx(0.200, rel=0.02)


@pytest.mark.parametrize(
    ("seconds_of_one", "later", "expected"), [(0.005, 2.0, 0.005), (0.005, 0.5, 0.025), (0.020, 2.0, 0.100)]
)
def test_stale_slow_estimate_is_doubted_if_its_point_is_faster(seconds_of_one, later, expected):
    times, other = ServiceTimes(), ("other", "default")
    times.set_profile(KEY, {1: 0.010})
    times.set_profile(other, {1: seconds_of_one})
    for _ in range(100):
        times.observe(KEY, 1, 0.010, now=10.0)
        times.observe(other, 1, 5.0 * seconds_of_one, now=10.0)
    times.observe(KEY, 1, 0.010, now=10.0 + later)

    assert times.expect(other, 1) == pytest.approx(expected, rel=0.1)


def test_noise_makes_predictions_cautious_but_one_pause_does_not():
    noisy, paused = ServiceTimes(), ServiceTimes()
    for times in (noisy, paused):
        times.set_profile(KEY, {1: 0.010})
    for n in range(200):
        noisy.observe(KEY, 1, 0.005 if n % 2 else 0.015)
    paused.observe(KEY, 1, 10.0)

    assert noisy.predict(KEY, 1) > 0.012
    assert paused.predict(KEY, 1) < 0.020


def test_without_profile_observations_are_averaged():
    times = ServiceTimes()
    assert times.predict(KEY, 4) == 0.0

    times.observe(KEY, 4, 0.040)
    assert times.predict(KEY, 4) == pytest.approx(0.040)
    assert times.predict(KEY, 8) == pytest.approx(0.080)


@pytest.mark.parametrize("rows", [1, 8])
def test_without_profile_a_pause_costs_one_rejection(rows):
    times = ServiceTimes()
    times.observe(KEY, 1, 10.0)
    times.relax([KEY])

    assert times.predict(KEY, rows) == 0.0
    for _ in range(20):
        times.observe(KEY, 1, 0.010)
    times.observe(KEY, 8, 10.0)
    assert times.predict(KEY, 8) < 1.0


def test_without_profile_constant_slowness_is_trusted():
    times = ServiceTimes()
    for _ in range(3):
        times.relax([KEY])
        times.observe(KEY, 1, 1.0)
    times.relax([KEY])

    assert times.predict(KEY, 1) > 0.9


OTHER = ("small", "half")


def seen(times, key=KEY, ratio=1.0, batches=60):
    for _ in range(batches):
        times.observe(key, 1, ratio * times.profiled(key, 1)[0])


def a_machine():
    times = ServiceTimes()
    times.set_profile(KEY, {1: 0.500})
    times.set_profile(OTHER, {1: 0.200})
    return times


def test_unreachable_rows_do_not_change_a_correct_estimate():
    times = a_machine()
    for _ in range(50):
        seen(times, batches=1)
        seen(times, OTHER, batches=1)
        for _ in range(MAX_IDLE_DROPS):
            times.relax([KEY, OTHER])

    assert times.predict(KEY, 1) == pytest.approx(0.500)
    assert times.predict(OTHER, 1) == pytest.approx(0.200)


def test_unobserved_point_approaches_the_observed_ones():
    times = a_machine()
    seen(times, ratio=3.0)
    seen(times, OTHER, ratio=1.5)
    slow = times.predict(KEY, 1)
    for _ in range(60):
        seen(times, OTHER, ratio=1.5, batches=1)
        times.relax([KEY, OTHER])

    assert slow > 1.4
    assert times.predict(KEY, 1) == pytest.approx(0.750, rel=0.05)
    assert times.predict(OTHER, 1) == pytest.approx(0.300, rel=0.05)


@pytest.mark.parametrize(("batches", "seconds"), [(0, 0.100), (60, 0.500)])
def test_slowness_that_drops_everything_fades(batches, seconds):
    times = a_machine()
    seen(times, ratio=10.0, batches=batches)
    for _ in range(60):
        times.relax([KEY, OTHER])

    assert times.predict(KEY, 1) < seconds


@pytest.mark.parametrize("ratio", [0.5, 0.25])
def test_too_slow_profile_is_outweighed_by_a_few_batches(ratio):
    times = a_machine()
    seen(times, ratio=ratio, batches=3)

    assert times.predict(KEY, 1) < 1.5 * ratio * 0.500
    assert times.predict(OTHER, 1) < 1.5 * ratio * 0.200, "what never ran starts from there"


def test_later_a_single_fast_batch_changes_little():
    times = a_machine()
    seen(times)
    seen(times, ratio=0.5, batches=1)

    assert times.predict(KEY, 1) > 0.48


def a_selection():
    variants = [a_variant(name) for name in ("old", "new", "other")]
    return ReplicaSelection(a_pipeline([a_stage(variants=variants)]).spec.stages[0], "new")


def a_replica(*ready, inflight=0, last_used=0, capacity=1):
    replica = ReplicaSlots(inflight=inflight, last_used=last_used)
    replica.set_ready_variants(frozenset(ready))
    replica.set_capacity(capacity)
    return replica


def test_variant_runs_once_it_is_ready():
    selection = a_selection()
    assert selection.variant_for(a_replica("old", "new"), "old") == "new"
    assert selection.variant_for(a_replica("old", "other"), "old") == "old"
    assert selection.variant_for(a_replica("other"), "old") == "other"
    assert selection.variant_for(a_replica(), "old") is None
    assert selection.effective_variant([a_replica("old")], "new", "old") == "old"
    assert selection.effective_variant([a_replica("old"), a_replica("new")], "new", "old") == "new"
    assert selection.effective_variant([], "new", "old") == "old"


def test_least_loaded_free_replica_with_planned_variant_is_next():
    selection, other = a_selection(), a_replica("old")
    busy, loaded = a_replica("new", inflight=1), a_replica("new", inflight=1, capacity=2)
    recent, rested = a_replica("new", last_used=9), a_replica("new", last_used=3)

    assert selection.free_replica([busy, other, loaded, recent, rested], "new") is rested
    assert selection.free_replica([busy, other, loaded], "new") is loaded
    assert selection.free_replica([busy, other], "new") is other
    assert selection.free_replica([busy], "new") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "huge"}, "spec.stages: stage stage-0 has no variant 'huge'; it has: small"),
        ({"operatingPoint": "half"}, "variant small has no operating point 'half'; it has: default"),
        ({"fallbacks": [{"name": "half", "accuracy": 0.5}]}, "variant small has no operating point 'half'"),
    ],
)
def test_plan_that_does_not_fit_the_pipeline_is_rejected(changes, message):
    pipeline = a_pipeline(1)

    with pytest.raises(DocumentError, match=message):
        validate_plan(a_plan(pipeline, **changes), pipeline)


@pytest.mark.parametrize("changes", [{"replicas": 5}, {"variant": "gpu"}])
def test_plan_above_the_budget_is_rejected(changes):
    """By the variants' own cores and GPUs, whatever the plan says that a replica has."""
    variants = [a_variant(resources={"cpu": "2"}), a_variant("gpu", resources={"cpu": "2", "gpu": 1})]
    pipeline = a_pipeline([a_stage(variants=variants)])  # 8 cores, no GPU

    assert accept_plan(a_plan(pipeline, replicas=4, cores="1000"), pipeline)
    with pytest.raises(DocumentError, match="but the budget is 8 cores and 0 GPUs"):
        accept_plan(a_plan(pipeline, cores="1m", **changes), pipeline)
    with pytest.raises(DocumentError, match="more cores than a number can hold"):
        accept_plan(a_plan(pipeline, replicas=10**400), pipeline)


def test_older_plan_is_read_unless_it_names_unknown_fallbacks():
    assert a_plan(a_pipeline(1), fallbackOperatingPoints=[]) == a_plan(a_pipeline(1))
    with pytest.raises(ValueError, match="fallbackOperatingPoints"):
        a_plan(a_pipeline(1), fallbackOperatingPoints=["half"])


def test_plan_of_other_pipeline_or_stage_is_rejected():
    with pytest.raises(DocumentError, match="the plan has no stage 'stage-1'; it has: stage-0"):
        validate_plan(a_plan(a_pipeline(1)), a_pipeline(2))

    other = a_plan(a_pipeline(1)).model_copy(deep=True)
    renamed = other.with_spec(pipeline="other")
    with pytest.raises(DocumentError, match=r"spec\.pipeline: the plan is for 'other', not for 'sample'"):
        validate_plan(renamed, a_pipeline(1))
