"""What a decision may choose among, kept between decisions: the same as worked out anew, and quickly found."""

from dataclasses import replace

import numpy as np
import pytest

from tests.router import modality_mix_decisions
from tests.router.test_queue import a_work, whole
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_router.scheduling.policies import POLICIES, modality_mix
from trimtab_router.scheduling.policies.interface import Dispatch, SchedulerView
from trimtab_router.scheduling.policies.job_groups import JobGroup, group_jobs, job_options
from trimtab_router.scheduling.policies.option_cache import OptionCache, precompute_tables, undominated
from trimtab_router.scheduling.policies.split_table import ESCALATION_FILL_ROWS, split_table
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, ServedRows

SENSES = ("audio", "video", "text")


def a_job(rows, floor=0.0, deadline=1.0, senses=SENSES):
    return a_work(rows, deadline, floor=floor, inputs=senses)


def a_view(*pieces):
    queue = DeadlineQueue(10_000)
    for piece in pieces:
        queue.push(piece)
    return SchedulerView(
        0.0, queue, modality_mix_decisions.POINTS, 64, 0.0, "Predicted", free_at=lambda: (0.0,), mixes_points=True
    )


def dispatched(view, policy=modality_mix):
    decision = policy.decide(view)
    assert isinstance(decision, Dispatch)
    return decision


def a_unit(*works):
    unit = JobGroup(1.0)
    for work in works:
        unit.add(whole(work), work.rows)
    return unit


@pytest.mark.parametrize("floor", [0.0, 0.5, 0.78, 0.9])
@pytest.mark.parametrize("drift", [{}, {"all": 1.6, "text": 3.0}])
def test_options_are_all_undominated_splits_above_the_floor(floor, drift, monkeypatch):
    monkeypatch.setattr(modality_mix_decisions, "DRIFT", drift)
    menu = OptionCache(a_view())
    found = job_options(menu, a_unit(a_job(9, floor)), mixed=True)
    assert found is not None

    cached = menu.point_options([whole(a_job(9))])
    page = cached.split_table.mixed(9)
    seconds = page.seconds(np.array(cached.slowdowns))
    reaching = np.flatnonzero(page.accuracy >= floor - 5e-5)
    kept = reaching[undominated(seconds[reaching], page.accuracy[reaching])]
    own = found.indices[1:] if found.first_share < 1 else found.indices
    assert own.tolist() == kept.tolist()
    assert found.seconds[-own.size :] == pytest.approx(seconds[kept])
    assert found.values[-own.size :] == pytest.approx(9 * page.accuracy[kept])


def test_first_pass_alone_is_an_option_if_time_is_short():
    found = job_options(OptionCache(a_view()), a_unit(a_job(9, 0.86)), mixed=False)

    assert found is not None
    assert found.first_share == 0.5
    line, rows = found.serving_options(0)[0]
    assert line.escalation is not None
    assert rows == 9
    assert found.seconds[0] < found.seconds[1:].min()


def test_small_jobs_are_grouped_if_no_split_is_cheaper():
    jobs = [whole(a_job(8, 0.78, deadline=1.0 + place)) for place in range(9)]
    view = a_view(*jobs)

    sizes = [unit.rows for unit in group_jobs(OptionCache(view), 20, (1, 16, 16, 32, 64))]
    assert sizes == [8, 16, 16, 32]


def test_only_the_profiled_point_escalates():
    job = a_job(4, 0.78)
    served = ServedRows("late", "audio-text", 4, 0.0, 0.0, 1, 0.33, 0.0)
    doubted = RowSlice(job, 0, 1, provisional_response=served, escalation=EscalationRule(0.43, "all", 0.7847, 0.1263))
    view = a_view(doubted)

    found = job_options(OptionCache(view), group_jobs(OptionCache(view), 20)[0], mixed=True)
    assert found is not None
    options = [line for option in range(found.indices.size) for line, _ in found.serving_options(option)]
    assert [(line.point, line.escalation) for line in options] == [(("", "all"), None)]
    assert found.values == pytest.approx([0.7847 - 0.33])
    assert [point.name for point in view.points if point.suits(doubted)] == ["all"]
    leaving = dispatched(view)
    assert leaving.point.name == "all"


def doubted_rows(rows, deadline):
    served = ServedRows("late", "audio-text", 64, 0.0, 0.0, rows, 0.33, 0.0)
    job = a_job(rows, 0.78, deadline)
    return whole(job, provisional_response=served, escalation=EscalationRule(0.43, "all", 0.7847, 0.1263))


def test_escalations_wait_for_others_while_they_have_time():
    full_seconds = max(point.seconds(64) for point in a_view().points)
    found = []
    for deadline in (2.0 * full_seconds, 0.6 * full_seconds):
        leaving = dispatched(a_view(doubted_rows(2, deadline), whole(a_job(24, 0.78, deadline=1.5))))
        found.append(leaving.row_slices[0].provisional_response is not None)

    assert found == [False, True]


def test_escalation_is_dispatched_at_once_if_queue_is_empty():
    leaving = dispatched(a_view(doubted_rows(2, 1.0), doubted_rows(3, 1.2)))

    assert leaving.point.name == "all"
    assert sum(piece.rows for piece in leaving.row_slices) == 5, "in one batch"


def test_escalated_rows_are_charged_a_shared_batch():
    book = OptionCache(a_view()).point_options([whole(a_job(4))]).split_table
    place, line = next((place, line) for place, line in enumerate(book.options) if line.escalation is not None)
    assert line.escalation is not None
    first, again = (np.array(book.batches[index].seconds) for index in (line.point_index, line.escalation_index))
    share = line.escalation.share
    charged, rows = np.array(book.split_options[place].seconds) - first, np.arange(65)
    alone = again[np.ceil(share * rows - 1e-9).astype(int)]

    few = share * rows <= ESCALATION_FILL_ROWS
    assert charged[few] == pytest.approx((share * rows * again[ESCALATION_FILL_ROWS] / ESCALATION_FILL_ROWS)[few])
    assert (charged <= alone + 1e-12).all()
    assert charged[16] < 0.6 * alone[16]


def test_low_confidence_accuracy_complements_the_confident():
    accuracy = EscalationRule(0.43, "all", 0.7847, 0.1263).low_confidence_accuracy(0.7275)
    assert accuracy == pytest.approx(0.3318, abs=1e-4)
    assert EscalationRule(0.43, "all").low_confidence_accuracy(0.7275) == 0.7275


def test_escalated_rows_need_no_further_accuracy():
    job = a_job(10, 0.8)
    assert job.missing_accuracy == pytest.approx(0.8)
    job.expected_correct, job.dispatched_rows, job.queued_rows = 6 * 0.82, 6, 4 + 2  # two of the six wait again

    assert job.missing_accuracy == pytest.approx((8.0 - 4.92) / 4)


def test_mixed_inputs_are_offered_points_that_read_the_common():
    menu = OptionCache(a_view())
    cached = menu.point_options([whole(a_job(1, senses=("audio", "text"))), whole(a_job(1))])

    assert sorted(point.name for point in cached.points) == ["audio", "audio-text", "text"]


def test_decision_among_twenty_jobs_takes_milliseconds():
    spent = modality_mix_decisions.decision_milliseconds((1, 15), views=60)

    assert np.median(spent) < 8.0, "about one millisecond on a machine that has nothing else to do"


def test_prepared_tables_are_reused_by_decisions():
    points = [replace(point, accuracy=0.97 * point.accuracy) for point in modality_mix_decisions.POINTS]
    book = split_table(points, "", 64)
    assert book.max_mixed_rows < 1

    precompute_tables(points, 64)()

    assert book.max_mixed_rows == MAX_SPLIT_ROWS
    assert split_table(points, "", 64) is book
    heard = [point for point in points if point.inputs is not None and point.inputs <= {"audio", "text"}]
    assert split_table(heard, "", 64).max_mixed_rows == MAX_SPLIT_ROWS


def test_decision_does_not_wait_for_tables_being_built(monkeypatch):
    points = [replace(point, accuracy=0.96 * point.accuracy) for point in modality_mix_decisions.POINTS]
    write, book = precompute_tables(points, 64), split_table(points, "", 64)
    job = a_job(64, floor=0.75, deadline=100.0)
    view = replace(a_view(whole(job)), points=points)

    early = POLICIES["ModalityMix"].decide(view)
    assert book.max_mixed_rows < 1
    assert isinstance(early, Dispatch)
    promised = early.point.accuracy if early.escalation is None else early.escalation.accuracy
    assert promised is not None
    assert promised >= 0.75

    write()
    assert book.max_mixed_rows == MAX_SPLIT_ROWS
    splits = OptionCache(view).point_options([whole(job)]).scaled_splits(64, mixed=True).split_set
    assert np.any(np.count_nonzero(splits.rows, axis=1) > 1)


def points_of(most_rows):
    for point in modality_mix_decisions.POINTS:
        full = point.profiled[-1]
        profiled = tuple(full * (rows // 64) + point.profiled[rows % 64 - 1] for rows in range(65, most_rows + 1))
        profiled = point.profiled + profiled
        yield replace(point, profiled=profiled, seconds=(0.0, *profiled).__getitem__)


LARGE_QUEUES = {
    "small": [a_job(1, deadline=9.0) for _ in range(200)],
    "with a floor": [a_job(2, 0.6)],
    "large": [a_job(150, 0.6)],
}


@pytest.mark.parametrize("jobs", LARGE_QUEUES.values(), ids=LARGE_QUEUES)
@pytest.mark.parametrize("name", POLICIES)
def test_batch_above_the_split_limit_leaves_by_every_policy(name, jobs):
    points = list(points_of(130))
    precompute_tables(points, 130)()
    view = replace(a_view(*map(whole, jobs)), points=points, max_batch_rows=130)
    assert OptionCache(view).point_options([whole(a_job(9))]).split_table.max_mixed_rows == MAX_SPLIT_ROWS

    leaving = dispatched(view, POLICIES[name])
    assert 1 <= sum(piece.rows for piece in leaving.row_slices) <= 130
