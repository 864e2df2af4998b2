"""Latencies of points, in rounds that take turns, so that what else the machine does falls on all alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.candidate_model import CandidateModel, Inputs
from trimtab_loadtester.payloads.interface import Payload
from trimtab_pipelines.operating_point import OperatingPoint, Precision

Show = Callable[[str], None]
ROUNDS = 5
PROBE_ROUNDS = 3
TIMING_SHARE = 0.4
"""Of the time there is, what timing may take where rounds and smaller batches can be left out."""
PROBE_SHARE = 0.1
"""Of the time there is, what may pass before the precisions are told apart, of which there is one round at least."""


@dataclass(frozen=True, slots=True)
class Timer:
    """Times points of a bench.

    Attributes:
        bench: what computes.
        payloads: the rows of the largest batch.
        show: told what is timed, round after round.
        budget: that timing ends by; of the largest batch, which decides, there is one round at least.
    """

    bench: CandidateModel
    payloads: Sequence[Payload]
    show: Show
    budget: TimeBudget

    def by_batch(
        self, points: Sequence[OperatingPoint], batches: Sequence[int], share: float = TIMING_SHARE
    ) -> dict[str, dict[int, float]]:
        """Seconds by batch size, the largest first, by point; smaller ones until a share of the budget is spent."""
        found: dict[str, dict[int, float]] = {point.name: {} for point in points}
        for batch in sorted(batches, reverse=True):
            if batch < max(batches) and self.budget.over(share):
                break
            inputs = self.bench.rows(self.payloads[:batch])
            for name, taken in self._rounds(points, inputs, ROUNDS, share, f"latency at batch {batch}").items():
                found[name][batch] = statistics.median(taken)
        return found

    def slow_precisions(self) -> Mapping[Precision, float]:
        """By precision, how many times as long as it is the model takes in it; of those alone that save no time.

        The shortest of a few rounds counts, which what else the machine does has lengthened least.
        """
        full, *others = self.bench.points
        probed: dict[Precision, OperatingPoint] = {}
        for point in others:
            if point.precision and point.merging is None:
                probed.setdefault(point.precision, point)
        if not probed:
            return {}
        inputs = self.bench.rows(self.payloads)
        taken = self._rounds([full, *probed.values()], inputs, PROBE_ROUNDS, PROBE_SHARE, "precisions")
        least = {name: min(seconds) for name, seconds in taken.items()}
        ratios = {precision: least[point.name] / least[full.name] for precision, point in probed.items()}
        return {precision: ratio for precision, ratio in ratios.items() if ratio >= 1}

    def _rounds(
        self, points: Sequence[OperatingPoint], inputs: Inputs, rounds: int, share: float, words: str
    ) -> dict[str, list[float]]:
        """Run one batch at all points in turn, round after round: the seconds of each, by name."""
        taken: dict[str, list[float]] = {point.name: [] for point in points}
        for turn in range(rounds + 1):
            for point in points:
                began = self.budget.clock()
                self.bench.run(inputs, point)
                if turn:  # the first warms up
                    taken[point.name].append(self.budget.clock() - began)
            self.show(words)
            if turn and self.budget.over(share):
                break
        return taken
