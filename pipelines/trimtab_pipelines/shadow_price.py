"""What a second of a replica is worth to those who are yet to come: the price that the fast loop pays for time. Pure.

Were load steady and endlessly divisible, the best use of a stage would be a mix of operating points: as many right
answers as the replicas have seconds for. The price is the dual value of these seconds in that linear program, and so
the slope of the best mixes' curve where the seconds end. A row is then served better only as long as that gives more
right answers a second than elsewhere; where there are seconds for the best point for everybody, time costs nothing.

A plan is with_shadow_price by what was profiled. The router prices it anew by how long batches take there: where they take longer,
a second gives fewer right answers, and the seconds there are reach less far.
"""

from collections.abc import Sequence

from trimtab_pipelines.accuracy_hull import best_mix
from trimtab_pipelines.plan import StagePlan

BUSY_SHARE = 0.85
"""Of a replica's seconds: what is left over goes to chance, since what is planned full waits without end."""


def shadow_price(points: Sequence[tuple[float, float]], rows_rps: float, replicas: int) -> float:
    """Expected right answers a second.

    Args:
        points: (seconds of a row in a full batch, accuracy) of each operating point allowed.
        rows_rps: rows a second that are expected.
        replicas: that share them.
    """
    if rows_rps <= 0:
        return 0.0
    return best_mix(points, seconds_per_row(rows_rps, replicas))[1]


def seconds_per_row(rows_rps: float, replicas: int) -> float:
    """Seconds that replicas have for a row, of so many (more than 0) a second."""
    return BUSY_SHARE * replicas / rows_rps


def with_shadow_price(stage: StagePlan, rows_rps: float) -> StagePlan:
    """The plan of a stage with the price of its time; 0 where nothing is known of how long it takes."""
    price = shadow_price(row_options(stage), rows_rps, stage.replicas)
    return stage.model_copy(update={"shadow_price": price, "shadow_price_at_rps": max(rows_rps, 0.0)})


def observed_shadow_price(stage: StagePlan, service_ratio: float) -> float:
    """The price of time where batches take so many times what was profiled; a plan with_shadow_price for no load keeps its own."""
    if not stage.shadow_price_at_rps:
        return stage.shadow_price
    slower = [(seconds * service_ratio, accuracy) for seconds, accuracy in row_options(stage)]
    return shadow_price(slower, stage.shadow_price_at_rps, stage.replicas)


def row_options(stage: StagePlan) -> list[tuple[float, float]]:
    """(seconds of a row in full batches, accuracy) of each way to answer it, second looks among them."""
    seconds = {p.name: p.service_seconds.get(stage.batch_size, 0.0) / stage.batch_size for p in stage.points}
    found = [(seconds[point.name], point.accuracy) for point in stage.points]
    looks = ((point.name, look) for point in stage.points for look in point.escalations)
    found += [
        (seconds[first] + look.share * seconds[look.to], look.accuracy)
        for first, look in looks
        if seconds[first] > 0 and seconds.get(look.to, 0.0) > 0
    ]
    return found
