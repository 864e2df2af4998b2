"""The paper's load played on digits-av: when its jobs come, what they ask for, and what is sent for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.mosel import load
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_router.request import RequestOptions

PEAK_OVER_CARRIED = 2.0
"""The paper's load at its peak, over what all senses carry (section 7.1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Jobs that are served and simulated alike.

    Attributes:
        arrivals_seconds: [N], ascending.
        rows: of each job, [N].
        floors: the accuracy that each asks for, to four digits, [N].
        seconds: how long they come.
        seed: they were drawn with.
    """

    arrivals_seconds: NDArray[np.float64]
    rows: NDArray[np.int64]
    floors: NDArray[np.float64]
    seconds: float
    seed: int

    @property
    def jobs_rps(self) -> float:
        """Jobs a second, on average."""
        return self.rows.size / self.seconds

    @property
    def mean_rows(self) -> float:
        """Rows of a job, on average."""
        return float(self.rows.mean())

    @property
    def wishes(self) -> tuple[RequestOptions, ...]:
        """What each asks for, as the router knows it."""
        return tuple(RequestOptions(accuracy_floor=floor) for floor in self.floors.tolist())

    def in_turns(self, distinct: int) -> "Played":
        """The same where only so many different jobs were sent, in turns."""
        turns = np.arange(self.rows.size) % max(distinct, 1)
        return replace(self, rows=self.rows[turns], floors=self.floors[turns])


def played(goes: NDArray[np.float64], peak_rps: float, accuracies: Sequence[float], seed: int) -> Played:
    """Jobs whose rows a second go as a load goes ([S], 0 … 1), up to a peak.

    Floors lie between the least and the most of the accuracies that the model's subsets have.
    """
    jobs = load.jobs(goes, peak_rps, seed)
    floors = np.round(jobs.floors(min(accuracies), max(accuracies)), 4)
    return Played(jobs.at_seconds, jobs.rows, floors, float(goes.size), seed)


def constant(rows_rps: float, seconds: int, accuracies: Sequence[float], seed: int) -> Played:
    """Jobs of the same sizes and floors, as many rows in each second."""
    return played(np.ones(seconds), rows_rps, accuracies, seed)


class PlayedPayloads:
    """What is sent for them: rows of digits whose truth is known.

    Args:
        jobs: one payload each.
        options: which rows they are made of.
    """

    def __init__(self, jobs: Played, options: JobOptions) -> None:
        self._jobs = jobs
        self._options = options
        self._scoring = DigitsAvPayloads(jobs.seed, options)

    def payload(self, index: int) -> Payload:
        """Draw one's rows."""
        rows, floor = int(self._jobs.rows[index]), float(self._jobs.floors[index])
        options = replace(self._options, rows=(rows, rows), floor=(floor, floor))
        return DigitsAvPayloads(self._jobs.seed, options).payload(index)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the rows whose digit is named; KeyError where the answer has no `digit`."""
        return self._scoring.score(truth, outputs)
