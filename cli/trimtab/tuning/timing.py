"""Latency measurement of operating points, in interleaved rounds so that other load affects all points equally."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.tuning.candidate_model import CandidateModel, Inputs
from trimtab_loadtester.payloads.interface import Payload
from trimtab_pipelines.operating_point import OperatingPoint, Precision

OnProgress = Callable[[str], None]
"""Called with a description of each step."""
ROUNDS = 5
PROBE_ROUNDS = 3
TIMING_SHARE = 0.4
"""Share of the time budget after which timing skips rounds and smaller batch sizes."""
PROBE_SHARE = 0.1
"""Share of the time budget after which probing precisions skips all rounds but the first."""


class TimeBudget:
    """Time limit of a search, which starts now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self._start = seconds, clock, clock()

    def over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent."""
        return self.left(share) <= 0

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is spent; negative afterwards."""
        return share * self.seconds - (self.clock() - self._start)


@dataclass(frozen=True, slots=True)
class Timer:
    """Measures latencies of operating points."""

    model: CandidateModel
    payloads: Sequence[Payload]
    """Rows of the largest batch."""
    on_progress: OnProgress
    budget: TimeBudget
    """The largest batch gets one round at least, whatever is left."""

    def by_batch(
        self, points: Sequence[OperatingPoint], batches: Sequence[int], share: float = TIMING_SHARE
    ) -> dict[str, dict[int, float]]:
        """Median seconds by point and batch size, the largest first; smaller ones while the budget's share lasts."""
        seconds: dict[str, dict[int, float]] = {point.name: {} for point in points}
        for batch in sorted(batches, reverse=True):
            if batch < max(batches) and self.budget.over(share):
                break
            inputs = self.model.rows(self.payloads[:batch])
            for name, rounds in self._rounds(points, inputs, ROUNDS, share, f"latency at batch {batch}").items():
                seconds[name][batch] = statistics.median(rounds)
        return seconds

    def slow_precisions(self) -> Mapping[Precision, float]:
        """Precisions in which the full model is not faster, with their time relative to its own precision.

        The minimum of a few rounds is compared, which other load affects least.
        """
        full, *others = self.model.points
        probes: dict[Precision, OperatingPoint] = {}
        for point in others:
            if point.precision and point.merging is None:
                probes.setdefault(point.precision, point)
        if not probes:
            return {}
        inputs = self.model.rows(self.payloads)
        rounds = self._rounds([full, *probes.values()], inputs, PROBE_ROUNDS, PROBE_SHARE, "precisions")
        fastest = {name: min(seconds) for name, seconds in rounds.items()}
        ratios = {precision: fastest[point.name] / fastest[full.name] for precision, point in probes.items()}
        return {precision: ratio for precision, ratio in ratios.items() if ratio >= 1}

    def _rounds(
        self, points: Sequence[OperatingPoint], inputs: Inputs, rounds: int, share: float, description: str
    ) -> dict[str, list[float]]:
        """Run one batch at all points in turn, round after round; return the seconds of each round by point."""
        seconds: dict[str, list[float]] = {point.name: [] for point in points}
        for number in range(rounds + 1):
            for point in points:
                start = self.budget.clock()
                self.model.run(inputs, point)
                if number:  # round 0 is the warm-up
                    seconds[point.name].append(self.budget.clock() - start)
            self.on_progress(description)
            if number and self.budget.over(share):
                break
        return seconds
