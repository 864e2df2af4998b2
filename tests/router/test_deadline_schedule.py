"""Schedule solver: schedules are feasible, near the optimum, and serve all jobs if that is possible."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from tests.router.schedules import a_queue, a_queue_of_batches, all_can_be_served, brute_force, exact, kept, senses
from trimtab_router.scheduling.policies.deadline_schedule import assign_to_servers, solve
from trimtab_router.scheduling.policies.schedule_table import DROPPED, Job, JointOption

SIZES = senses(12)
SEEDS = draw.integers(0, 2**32 - 1)


def a_job(deadline, *options, worth=0.0, together=()):
    seconds, values = (np.array(side, dtype=float) for side in zip(*options, strict=True))
    return Job(deadline, seconds, values, worth, together)


def a_small_queue(rng):
    jobs = []
    for deadline in np.sort(rng.uniform(0, 1, int(rng.integers(1, 5)))):
        count = int(rng.integers(1, 4))
        seconds, values = np.sort(rng.uniform(0.05, 0.6, count)), np.sort(rng.uniform(0.1, 1.0, count))
        jobs.append(Job(float(deadline), seconds, values))
    return jobs


@settings(max_examples=150, deadline=None)
@given(SEEDS, draw.floats(0, 0.3))
def test_small_queues_equal_brute_force_with_fine_cells(seed, start):
    jobs = a_small_queue(np.random.default_rng(seed))
    found = solve(jobs, start, cells=20_000)

    assert kept(jobs, found, start) == pytest.approx(found.value)
    assert found.value == pytest.approx(brute_force(jobs, start), abs=1e-3)
    assert exact(jobs, start)[1] == pytest.approx(brute_force(jobs, start))


@pytest.mark.parametrize("load", [0.7, 1.5, None], ids=["jobs, calm", "jobs, overload", "batches"])
def test_queues_are_within_a_thousandth_on_average(load):
    rng = np.random.default_rng(3)
    queues = [a_queue_of_batches(rng, 12) if load is None else a_queue(rng, 8, SIZES, load) for _ in range(12)]

    assert np.mean([1 - kept(jobs, solve(jobs, 0.0)) / exact(jobs)[1] for jobs in queues]) < 1e-3


@settings(max_examples=150, deadline=None)
@given(SEEDS, draw.integers(1, 20), draw.floats(0.3, 3.0))
def test_no_job_is_dropped_if_all_can_be_served(seed, count, load):
    jobs = a_queue(np.random.default_rng(seed), count, SIZES, load, worth=1.0)
    found = solve(jobs, 0.0, price=0.3)
    kept(jobs, found)

    if all_can_be_served(jobs):
        assert found.served == count


def test_deadlines_met_exactly_by_the_fastest_option_are_met():
    rng = np.random.default_rng(0)
    jobs = a_queue(rng, 20, SIZES, 1.0, worth=1.0)
    ends = np.cumsum([job.seconds[0] for job in jobs])
    tight = [replace(job, deadline=float(end)) for job, end in zip(jobs, ends, strict=True)]

    assert solve(tight, 0.0).served == 20
    assert solve(tight, 1e-4).served < 20


def test_each_deadline_bounds_its_own_prefix():
    jobs = [a_job(0.1, (0.05, 1), (0.2, 3)), a_job(0.2, (0.05, 1), (0.15, 3)), a_job(1.0, (0.1, 1), (0.7, 2))]
    found = solve(jobs, 0.0)

    assert [step.option for step in found.steps] == [0, 1, 1]


def test_least_valuable_job_is_dropped_in_overload():
    jobs = [a_job(0.1, (0.06, 5), worth=1), a_job(0.11, (0.06, 0.1), worth=2), a_job(0.3, (0.1, 1), worth=1)]
    found = solve(jobs, 0.0)

    assert [step.option for step in found.steps] == [DROPPED, 0, 0]
    assert found.value == pytest.approx(1.1)


def test_price_of_time_selects_the_faster_option():
    jobs = [a_job(1.0, (0.1, 6.0), (0.3, 6.5), worth=1)]

    assert solve(jobs, 0.0).steps[0].option == 1
    assert solve(jobs, 0.0, price=3.0).steps[0].option == 0
    assert solve(jobs, 0.0, price=1000.0).steps[0].option == 0, "worth goes before the price"


def test_joint_option_saves_time():
    group = JointOption(3, np.array([0.1]), np.array([3.0]))
    jobs = [a_job(0.15, (0.08, 1.0), together=[group]), a_job(0.15, (0.08, 1.0)), a_job(0.16, (0.08, 1.0))]
    found = solve(jobs, 0.0)

    assert [(step.jobs, step.option) for step in found.steps] == [(3, 0)]
    assert kept(jobs, found) == found.value == 3.0


def test_group_keeps_the_deadline_of_its_first_job():
    group = JointOption(2, np.array([0.1]), np.array([20.0]))
    jobs = [a_job(0.09, (0.08, 1.0), together=[group]), a_job(0.5, (0.08, 1.0))]

    assert [step.jobs for step in solve(jobs, 0.0).steps] == [1, 1]


def test_late_job_is_dropped_and_delays_no_other():
    assert [step.option for step in solve([a_job(-1.0, (0.1, 1.0)), a_job(0.5, (0.1, 1.0))], 0.0).steps] == [DROPPED, 0]
    assert solve([a_job(-1.0, (0.1, 1.0))], 0.0).served == 0
    assert solve([], 0.0).steps == ()


def test_jobs_go_to_the_server_that_ends_them_first():
    jobs = [(0.3, 1.0), (0.1, 1.0), (0.1, 1.0), (0.1, 0.2)]  # seconds and deadline

    assert assign_to_servers(jobs, [0.0, 0.05]) == [[0], [1, 2, 3]]
