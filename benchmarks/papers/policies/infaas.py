"""A baseline after INFaaS: several models, of which the most accurate one that carries the load is used.

INFaaS prefers a loaded variant among those that are fast enough, and changes to a larger one only if that carries the
load with headroom. Its points are separate models; the benchmark charges the seconds of loading one.
"""

from benchmarks.papers.policies.pets import in_turn
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil

HEADROOM = 1.2
"""Capacity over load that a model must have to be changed to."""


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    return in_turn(view, _model(view))


def _model(view: SchedulerView) -> Point:
    load_rps = view.arrivals_rps()
    better_first = sorted(view.points, key=lambda point: -point.accuracy)
    quickest = min(view.points, key=lambda point: point.seconds(view.max_batch_rows))
    with_room = next((point for point in better_first if _carries(view, point) >= HEADROOM * load_rps), quickest)
    loaded = next((point for point in view.points if point.name == view.loaded_point), None)
    if loaded is None or _carries(view, loaded) < load_rps or with_room.accuracy > loaded.accuracy:
        return with_room
    return loaded


def _carries(view: SchedulerView, point: Point) -> float:
    """Return the rows per second of full batches on all replicas."""
    seconds = point.seconds(view.max_batch_rows)
    return max(view.ready_replicas, 1) * view.max_batch_rows / seconds if seconds > 0 else float("inf")


POLICY = Policy(decide, uses_fallbacks=True)
