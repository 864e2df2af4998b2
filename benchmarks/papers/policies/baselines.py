"""Simple baselines: PetS, INFaaS, all modalities, and one fixed operating point."""

from dataclasses import replace
from functools import partial

from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.queue_plan import first_rows

INFAAS_HEADROOM = 1.2
"""Capacity over load that a model must have to be changed to."""


def decide_pets(view: SchedulerView) -> Dispatch | WaitUntil:
    """PetS's shared batches: order of arrival, mixed tasks, always at the planned point.

    PetS splits the queries of a task into batches of similar lengths and joins those of several tasks by tables of
    costs. All images have one length, so only full batches in order of arrival remain. PetS uses neither deadlines nor
    utilities.
    """
    return _dispatch_first_arrivals(view, view.points[0])


def decide_infaas(view: SchedulerView) -> Dispatch | WaitUntil:
    """INFaaS: of several models the most accurate one that carries the load.

    INFaaS prefers a loaded variant among those that are fast enough, and changes to a larger one only if that carries
    the load with headroom. Its points are separate models; the benchmark charges the seconds of loading one.
    """
    return _dispatch_first_arrivals(view, _choose_model(view))


def _dispatch_first_arrivals(view: SchedulerView, point: Point) -> Dispatch | WaitUntil:
    """Dispatch the first arrivals, and all that may share their batch, at a point."""
    waiting = sorted(view.waiting, key=lambda row_slice: row_slice.request.enqueued_at)
    if not waiting:
        return WaitUntil()
    signature = waiting[0].request.signature
    alike = [row_slice for row_slice in waiting[1:] if row_slice.request.signature == signature and not row_slice.alone]
    alike = [] if waiting[0].alone else alike
    return Dispatch(point, first_rows([waiting[0], *alike], view.max_batch_rows))


def _choose_model(view: SchedulerView) -> Point:
    load_rps = view.arrivals_rps()
    better_first = sorted(view.points, key=lambda point: -point.accuracy)
    fastest = min(view.points, key=lambda point: point.seconds(view.max_batch_rows))
    with_room = (point for point in better_first if _capacity_rps(view, point) >= INFAAS_HEADROOM * load_rps)
    best = next(with_room, fastest)
    loaded = next((point for point in view.points if point.key == view.loaded_point), None)
    if loaded is None or _capacity_rps(view, loaded) < load_rps or best.accuracy > loaded.accuracy:
        return best
    return loaded


def _capacity_rps(view: SchedulerView, point: Point) -> float:
    """Return the rows per second of full batches on all replicas."""
    seconds = point.seconds(view.max_batch_rows)
    return max(view.ready_replicas, 1) * view.max_batch_rows / seconds if seconds > 0 else float("inf")


def decide_all_modalities(view: SchedulerView) -> Dispatch | WaitUntil:
    """No selection of modalities: the most urgent rows first, always at the most accurate point."""
    best = max(view.points, key=lambda point: point.accuracy)
    return earliest_deadline_first.decide(replace(view, points=(best,)))


def decide_fixed(view: SchedulerView, *, point: str) -> Dispatch | WaitUntil:
    """Merging or prompting by a fixed number at its best: one point, urgent rows first, least valuable rows dropped."""
    return earliest_deadline_first.decide(replace(view, points=[each for each in view.points if each.name == point]))


def fixed(point: str) -> Policy:
    """Return the policy that uses this point alone."""
    return Policy(partial(decide_fixed, point=point), uses_fallbacks=True)


PETS = Policy(decide_pets, uses_fallbacks=True)
INFAAS = Policy(decide_infaas, uses_fallbacks=True)
ALL_MODALITIES = Policy(decide_all_modalities, uses_fallbacks=True)
