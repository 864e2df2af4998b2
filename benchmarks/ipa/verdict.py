"""From cells to statements: means with intervals, and where our plan stands against the baselines' Pareto front.

A request that was late or dropped counts as accuracy 0, so a planner cannot buy its place on the front by violations.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.ipa.cells import BASELINES, OURS, Measured

Standing = Literal["above", "on", "below"]
Results = Mapping[tuple[str, str, str], Sequence[Measured]]
_STUDENT_97_5 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
SAME_CORES = 0.005
SAME_ACCURACY = 0.0005
"""What counts as the same where the seeds' own interval is narrower: half a percent of the cores, 0.05 points."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the half width of its 95 % interval (Student's t); NaN with one seed."""

    mean: float
    half: float


def interval(values: Iterable[float]) -> Interval:
    """The mean of some values, one a seed, and its 95 % interval."""
    found = np.array(list(values), dtype=np.float64)
    if found.size < 2:
        return Interval(float(found.mean()) if found.size else math.nan, math.nan)
    student = _STUDENT_97_5.get(found.size, 1.96)
    return Interval(float(found.mean()), student * float(found.std(ddof=1)) / math.sqrt(found.size))


def by_method(measured: Iterable[Measured]) -> dict[tuple[str, str, str], list[Measured]]:
    """Group cells by (pipeline, workload, method), in the order of their seeds."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for one in sorted(measured, key=lambda m: m.cell.seed):
        groups.setdefault((one.cell.pipeline, one.cell.workload, one.cell.method), []).append(one)
    return groups


@dataclass(frozen=True, slots=True)
class Place:
    """Where our plan stands in one pipeline under one workload.

    `margin` is our served accuracy over the best that a baseline reaches with no more cores; NaN where none does.
    `mixture_margin` is the same against any mixture of baselines over time, which none of them is.
    """

    standing: Standing
    margin: float
    mixture_margin: float
    beaten_by: str = ""


def place(results: Results, pipeline: str, workload: str, method: str = OURS) -> Place:
    """Compare ours with every baseline, seed by seed on the same arrivals."""
    ours = results[pipeline, workload, method]
    rivals = {name: results[pipeline, workload, name] for name in BASELINES if (pipeline, workload, name) in results}
    beaten_by = next((name for name, theirs in rivals.items() if _dominates(theirs, ours)), "")
    our_point = _point(ours)
    points = [_point(theirs) for theirs in rivals.values()]
    margin = our_point[1] - max((a for c, a in points if c <= our_point[0]), default=math.nan)
    above = not math.isnan(margin) and margin > SAME_ACCURACY
    standing: Standing = "below" if beaten_by else ("above" if above or math.isnan(margin) else "on")
    return Place(standing, margin, our_point[1] - _mixture(points, our_point[0]), beaten_by)


def _dominates(theirs: Sequence[Measured], ours: Sequence[Measured]) -> bool:
    """Whether a rival has no more cores and no less accuracy on average, and clearly the better of one of these."""
    pairs = list(zip(theirs, ours, strict=True))
    cores = interval(a.cores - b.cores for a, b in pairs)
    accuracy = interval(a.served_accuracy - b.served_accuracy for a, b in pairs)
    if cores.mean > 0 or accuracy.mean < 0:
        return False
    same_cores = SAME_CORES * float(np.mean([one.cores for one in ours]))
    cheaper = cores.mean < -max(_known(cores.half), same_cores)
    better = accuracy.mean > max(_known(accuracy.half), SAME_ACCURACY)
    return cheaper or better


def _known(half: float) -> float:
    return 0.0 if math.isnan(half) else half


def _point(cells: Sequence[Measured]) -> tuple[float, float]:
    return float(np.mean([c.cores for c in cells])), float(np.mean([c.served_accuracy for c in cells]))


def _mixture(points: Sequence[tuple[float, float]], cores: float) -> float:
    """The most accuracy any mixture of points reaches at these cores or fewer; 0 where nothing is as cheap."""
    best = max((a for c, a in points if c <= cores), default=0.0)
    for cheap, low in points:
        for dear, high in points:
            if cheap < cores < dear:
                best = max(best, low + (high - low) * (cores - cheap) / (dear - cheap))
    return best
