"""Batches of many tasks by utility times accuracy: who leaves, at which point, and who is given up."""

import time
from dataclasses import replace

import numpy as np
import pytest

from tests.router.schedules import exact
from tests.router.token_queues import POINTS, ROW_MS, TASKS, a_point, a_random_view, a_view, a_work, eight_points
from trimtab_pipelines.escalation import TaskEscalation
from trimtab_router.scheduling.policies import token_adaptive
from trimtab_router.scheduling.policies.deadline_schedule import solve
from trimtab_router.scheduling.policies.interface import Dispatch, Escalation
from trimtab_router.scheduling.policies.schedule_table import DROPPED
from trimtab_router.scheduling.policies.split_table import split_table
from trimtab_router.scheduling.policies.token_options import TokenOptions, candidate_batches, marginal_utility


def dispatched(view, **changes):
    found = token_adaptive.decide(view, **changes)
    assert isinstance(found, Dispatch)
    return found


def left(view):
    found = dispatched(view)
    return found.point.name, [piece.request for piece in found.row_slices]


def test_few_rows_with_slack_share_the_best_point():
    works = [a_work(0.5, task=TASKS[n % 2], utility=(0.01, 0.2, 1.0)[n % 3]) for n in range(9)]

    point, batch = left(a_view(works))

    assert point == "more"
    assert set(batch) == set(works)


def test_high_arrival_rate_makes_few_rows_pay_for_time():
    works = [a_work(0.5, at=0.0) for _ in range(4)]

    assert left(a_view(works, arrivals_rps=100.0))[0] == "more"
    assert left(a_view(works, arrivals_rps=700.0))[0] == "few"


def test_seconds_that_replicas_would_be_idle_in_cost_nothing():
    few, many = ([a_work(0.5, at=0.0) for _ in range(rows)] for rows in (4, 100))

    assert left(a_view(few, arrivals_rps=400.0))[0] == "more", "the fastest point carries 940"
    assert left(a_view(many, arrivals_rps=400.0))[0] != "more"
    assert left(a_view(few, arrivals_rps=1600.0))[0] == "few"


@pytest.mark.parametrize(("gain", "point"), [(0.001, "better"), (0.0, "faster")])
def test_idle_seconds_are_worth_a_little_accuracy(gain: float, point: str) -> None:
    better, faster = (
        replace(a_point("more", row_ms=row_ms), name=name, accuracy_by_task=dict.fromkeys(TASKS, accuracy))
        for name, row_ms, accuracy in (("better", 4.6, 0.947 + gain), ("faster", 2.0, 0.947))
    )

    assert left(a_view([a_work(0.5)], points=[better, faster, a_point("few")]))[0] == point


def test_long_batch_costs_time_if_a_step_would_be_late():
    works, points = [a_work(0.5, at=0.0) for _ in range(4)], [a_point("more", row_ms=40.0), *POINTS[1:]]

    assert left(a_view(works, points=points, arrivals_rps=100.0))[0] == "more"
    assert left(a_view(works, points=points, arrivals_rps=200.0))[0] != "more", "rows of a fourfold load wait 0.43 s"


def test_price_of_time_leaves_out_the_margin_for_variation():
    works = [a_work(0.5, at=0.0) for _ in range(4)]
    twice = [a_point(point.name, row_ms=2.0 * ROW_MS[point.name]) for point in POINTS]
    sure = [replace(point, expected_seconds=own.seconds) for point, own in zip(twice, POINTS, strict=True)]

    assert left(a_view(works, points=twice, arrivals_rps=350.0))[0] == "few"
    assert left(a_view(works, points=sure, arrivals_rps=350.0))[0] == "more"


def test_queue_without_much_slack_makes_rows_pay_for_time():
    works = [a_work(0.5, at=0.0) for _ in range(4)]

    assert left(a_view(works, arrivals_rps=190.0, now=0.1)) == left(a_view(works, arrivals_rps=190.0))
    assert [left(a_view(works, arrivals_rps=190.0, now=now))[0] for now in (0.1, 0.35, 0.45)] == ["more", "some", "few"]


@pytest.mark.parametrize(("reserved", "point"), [(0.4, "more"), (0.48, "some"), (0.495, "more")])
def test_rows_leave_time_to_later_stages_if_they_can(reserved: float, point: str) -> None:
    """9 rows take 33 ms at the slowest point, 16.5 at the next but one, and 11 at the fastest."""
    view = a_view([a_work(0.5) for _ in range(9)], reserved_seconds=reserved)

    assert left(view)[0] == point


def test_time_of_later_stages_makes_rows_pay_sooner() -> None:
    works = [a_work(0.5, at=0.0) for _ in range(4)]

    assert left(a_view(works, arrivals_rps=250.0, now=0.25))[0] == "more"
    assert left(a_view(works, arrivals_rps=250.0, now=0.25, reserved_seconds=0.15))[0] == "few"


@pytest.mark.parametrize(("deadline", "point", "size"), [(0.5, "more", 4), (0.1, "more", 4), (0.025, "few", 20)])
def test_larger_batch_than_planned_is_no_slower(deadline: float, point: str, size: int) -> None:
    """The slowest planned batch takes 18 ms; 20 rows take 22 ms at the fastest point, and longer at the others."""
    found = left(a_view([a_work(deadline) for _ in range(20)], planned_batch_rows=4))

    assert (found[0], len(found[1])) == (point, size)


def test_least_valuable_rows_are_given_up_in_overload():
    cheap = [a_work(0.034, utility=0.01) for _ in range(32)]
    dear = [a_work(0.036, utility=1.0) for _ in range(32)]

    assert set(left(a_view([*cheap, *dear]))[1]) == set(dear)


@pytest.mark.parametrize(("arrivals_rps", "first"), [(0.0, 0.104), (1500.0, 0.145)])
def test_small_batch_is_given_up_for_full_ones_in_overload(arrivals_rps: float, first: float) -> None:
    """The most urgent row takes 3 ms alone, in which full batches serve 2.8; some others are late in any case."""
    works = [a_work(0.104), *(a_work(0.145) for _ in range(50))]

    assert left(a_view(works, now=0.1, arrivals_rps=arrivals_rps))[1][0].deadline == first


def test_next_batch_fits_the_slack_of_its_most_urgent_row():
    urgent = [a_work(0.012) for _ in range(4)]
    patient = [a_work(1.0) for _ in range(60)]

    _, batch = left(a_view([*urgent, *patient]))

    assert set(urgent) <= set(batch)
    assert len(batch) <= 10


@pytest.mark.parametrize("most_rows", [1, 2, 3, 5])
def test_batches_stay_within_the_row_limit(most_rows):
    view = replace(a_view([a_work(1.0) for _ in range(12)]), max_batch_rows=most_rows)

    assert max(batch.rows for batch in candidate_batches(view, 12)) <= most_rows
    assert 1 <= len(left(view)[1]) <= most_rows


def test_floor_is_kept_for_the_requested_task():
    point, _ = left(a_view([a_work(0.0055, task="birds", floor=0.89)], arrivals_rps=5000.0))

    assert point == "all"


def test_low_confidence_rows_escalate_if_it_pays():
    first = a_point("few", [Escalation(0.5, "more", 0.92, 0.2)])
    rest = [point for point in POINTS if point.name != "few"]
    works = [a_work(0.09, task="") for _ in range(32)]

    found = dispatched(a_view(works, points=(*rest, first), arrivals_rps=50.0))

    assert found.point.name == "few"
    assert found.escalation is not None
    assert (found.escalation.to, found.escalation.confidence_below, found.escalation.accuracy) == ("more", 0.5, 0.92)


def test_never_policy_dispatches_the_largest_batches():
    view = a_view([a_work(-1.0) for _ in range(40)])
    view.drop_policy = "Never"

    assert len(left(view)[1]) == 32


def test_large_request_is_dispatched_in_parts():
    _, batch = left(a_view([a_work(5.0, rows=100)]))
    found = dispatched(a_view([a_work(5.0, rows=100)]))

    assert len(batch) == 1
    assert sum(piece.rows for piece in found.row_slices) <= 32


def test_last_second_goes_where_it_adds_most():
    dear, cheap = [(1.0, 5.0), (2.0, 8.0)], [(1.0, 0.5), (3.0, 1.5)]
    curves = [(10, dear), (10, cheap)]

    assert marginal_utility(curves, 25.0) == 3.0
    assert marginal_utility(curves, 35.0) == 0.5
    assert marginal_utility(curves, 100.0) == 0.0
    assert marginal_utility(curves, 15.0) == 0.5, "not all of the second kind are served"
    assert marginal_utility(curves, 1.0) == 5.0


def test_choice_is_within_a_thousandth_of_the_exact_one():
    rng, gaps = np.random.default_rng(5), []
    for _ in range(12):
        view = a_random_view(rng, 400, eight_points())
        jobs = [each.job() for each in token_adaptive.plan_batches(view, TokenOptions(view), joins_batches=False)]
        assert len(jobs) >= 12
        gaps.append(1.0 - solve(jobs, 0.0).value / exact(jobs)[1])

    assert np.mean(gaps) < 1e-3
    assert min(gaps) > -1e-9


def test_batch_has_one_utility_level_and_a_bounded_size():
    view = a_random_view(np.random.default_rng(1), 1500, POINTS)
    batches = candidate_batches(view, 40)

    assert len(batches) == 40
    for batch in batches:
        utilities = [piece.request.options.utility for piece in batch.slices]
        assert max(utilities) <= 2 * min(utilities)
        assert sum(piece.rows for piece in batch.slices) == batch.rows <= 32
    assert [b.deadline for b in batches] == sorted(b.deadline for b in batches)


def test_decision_takes_milliseconds():
    """The bar is 3 ms on a quiet machine (`make bench NAME=schedule`); the best of a few counts."""
    view = a_random_view(np.random.default_rng(2), 1400, eight_points())
    spent = []
    for _ in range(7):
        begun = time.process_time()
        token_adaptive.decide(view)
        spent.append(time.process_time() - begun)

    assert min(spent) < 0.015


def test_given_up_rows_stay_queued():
    works = [a_work(0.05, utility=0.01) for _ in range(32)] + [a_work(0.06) for _ in range(32)]
    found = dispatched(a_view(works))

    assert not found.drops


@pytest.mark.parametrize("priced", [True, False])
def test_rows_of_zero_utility_do_not_stop_the_policy(priced):
    found = dispatched(a_view([a_work(0.5, utility=0.0) for _ in range(5)]), uses_shadow_price=priced)

    assert found.row_slices


def test_unreachable_queue_is_dropped():
    view = a_view([a_work(0.001)])
    jobs = [each.job() for each in token_adaptive.plan_batches(view, TokenOptions(view))]

    assert [step.option for step in solve(jobs, 0.0).steps] == [DROPPED]


def test_escalation_by_task_adds_its_profiled_gain() -> None:
    by_task = {
        "cars": TaskEscalation(confidence_below=0.6, share=0.3, accuracy=0.94),
        "birds": TaskEscalation(confidence_below=0.0, share=0.0, accuracy=0.7),
    }
    look = Escalation(0.4, "more", 0.82, 0.15, by_task)
    points = (a_point("more"), a_point("few", [look]))
    menu = TokenOptions(a_view([], points=points))
    twice = next(choice for choice in menu.options if choice.escalation is not None)

    assert [menu.accuracy_for(twice, task) for task in ("cars", "birds")] == [0.94, 0.7]
    assert menu.accuracy_for(twice, "ships") == points[1].accuracy_for("ships"), "without a threshold"
    found = dispatched(a_view([a_work(0.08) for _ in range(32)], points=points))
    assert found.escalation is not None
    assert (
        found.escalation.for_task("cars").confidence_below,
        found.escalation.for_task("birds").confidence_below,
    ) == (0.6, 0.0)
    assert found.escalation.for_task("ships").accuracy is None


def test_single_row_costs_its_share_of_an_escalation() -> None:
    look = Escalation(0.4, "more", 0.9, 0.15)
    points = (a_point("more"), a_point("few", [look]))
    view = replace(a_view([a_work(0.006)], points=points), max_batch_rows=1)

    assert dispatched(view).escalation == look


def test_split_table_uses_escalations_of_its_task() -> None:
    own = Escalation(0.4, "more", 0.82, 0.15, {"cars": TaskEscalation(confidence_below=0.6, share=0.3, accuracy=0.94)})
    whole = Escalation(0.5, "more", 0.85, 0.4)
    points = (a_point("more"), a_point("few", [own, whole]))

    def looks(task: str) -> list[tuple[float, float]]:
        (_, few) = split_table(points, task, 32).costs
        return [(look.share, look.accuracy) for look in few.escalations]

    assert looks("") == [(0.4, 0.85)]
    assert looks("cars") == [(0.3, 0.94)]
    assert looks("birds") == []
