"""Several models instead of one: the most accurate that carries the load, the loaded one as long as it does. Pure.

A baseline after INFaaS: of the variants that are fast enough it prefers one that is loaded, and goes to a larger one
only when that would carry the load with something to spare. Its points are models of their own; whoever runs it charges
the seconds of loading one where another ran before.
"""

from benchmarks.papers.policies.pets import in_turn
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil

HEADROOM = 1.2
"""How much more than the load a model must carry to be changed to."""


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let those who came first leave, by the model chosen for the load."""
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
    """Rows a second of full batches by all replicas."""
    seconds = point.seconds(view.max_batch_rows)
    return max(view.ready_replicas, 1) * view.max_batch_rows / seconds if seconds > 0 else float("inf")


POLICY = Policy(decide, uses_fallbacks=True)
