"""The same comparison in simulated time, beside the most that any policy could carry by the profile.

No neighbour takes part of the machine here, so what is found is the policy's own doing. The most that could be carried
is a linear program: full batches of the cheapest mix that reaches the floor, without idle moments and without chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.modalities.searching import FEW
from benchmarks.modalities.setting import NONE, Setting, plan_for, slowed
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import OK
from trimtab_pipelines.shadow_price import best_mixes, row_options
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.request import RequestOptions

STEPS = 6
WAY_SECONDS = 0.002
"""From a request's arrival until its rows are queued, and from the last batch until its caller has the answer."""
USUAL = Environment(before_seconds=WAY_SECONDS, after_seconds=WAY_SECONDS)
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Asked:
    """Jobs of `rows` (least, most) with one floor, over so many seconds, drawn by a seed."""

    rows: tuple[int, int]
    floor: float
    seconds: float
    seed: int = 1

    @property
    def mean_rows(self) -> float:
        """Rows of a job."""
        return sum(self.rows) / 2


@dataclass(frozen=True, slots=True)
class Imagined:
    """What came of a load: share of jobs late or below their floor in expectation, and mean expected accuracy."""

    jobs_rps: float
    violations: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Simulating:
    """A method of choosing senses on a machine of these profiles, thought to take `setting.misjudged` times as long."""

    setting: Setting
    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]

    def offer(self, asked: Asked, jobs_rps: float) -> Imagined:
        """Offer a load under the plan for it."""
        rng = np.random.default_rng(asked.seed)
        arrivals = np.sort(rng.uniform(0.0, asked.seconds, rng.poisson(jobs_rps * asked.seconds)))
        low, high = asked.rows
        rows = tuple(rng.integers(low, high + 1, max(arrivals.size, 1)).tolist())
        plan = plan_for(self.setting, self.pipeline, self._thought(), jobs_rps, asked.mean_rows, 1)
        found = self.play(
            arrivals, asked.seconds, rows, (RequestOptions(accuracy_floor=asked.floor),), plan, seed=asked.seed
        )
        met = (found.outcomes == OK) & (found.accuracy >= asked.floor - _ROUNDING)
        return Imagined(jobs_rps, 1.0 - float(met.mean()), found.mean_accuracy)

    def play(
        self,
        arrivals: NDArray[np.float64],
        seconds: float,
        rows: tuple[int, ...],
        wishes: tuple[RequestOptions, ...],
        plan: PipelinePlan,
        *,
        seed: int = 1,
        conditions: Environment = USUAL,
    ) -> SimulationResult:
        """Have jobs come when they are due, under a plan; rows and wishes take turns."""
        scenario = Scenario(
            pipeline=self.pipeline,
            profiles=slowed(self.profiles, 1.0 / self.setting.cores),
            arrivals_seconds=arrivals,
            duration_seconds=seconds,
            plan=plan,
            environment=conditions,
            rows=rows,
            options=wishes,
            seed=seed,
        )
        return simulate(scenario)

    def carried(self, asked: Asked) -> Imagined:
        """The most it carries with one violation in a hundred, by bisection below what anybody could."""
        low, high = self.offer(asked, 0.3 * self.most_rps(asked)), self.most_rps(asked)
        for _ in range(STEPS):
            found = self.offer(asked, (low.jobs_rps + high) / 2)
            low, high = (found, high) if found.violations <= FEW else (low, found.jobs_rps)
        return low

    def most_rps(self, asked: Asked) -> float:
        """Jobs a second of the cheapest mix of full batches that reaches the floor."""
        stage = plan_for(self.setting, self.pipeline, self._thought(), 1.0, asked.mean_rows, 1).spec.stages[0]
        known = [best_way(stage)] if self.setting.method == NONE else row_options(stage)
        return 1.0 / (cheapest(known, asked.floor) * asked.mean_rows)

    def _thought(self) -> dict[str, ModelProfile]:
        return slowed(self.profiles, self.setting.misjudged / self.setting.cores)


def best_way(stage: StagePlan) -> tuple[float, float]:
    """(seconds of a row in full batches, accuracy) of the most accurate point."""
    point = max(stage.points, key=lambda point: point.accuracy)
    return point.service_seconds[stage.batch_size] / stage.batch_size, point.accuracy


def cheapest(known: Sequence[tuple[float, float]], floor: float) -> float:
    """Seconds per row of the cheapest mix of options (seconds, accuracy) that reaches a floor; every row is served.

    Raises:
        ValueError: none reaches it.
    """
    corners = best_mixes(known)[1:]
    if not corners or corners[-1][1] < floor:
        raise ValueError(f"no mix reaches {floor}")
    for (fast, low), (slow, high) in pairwise(corners):
        if low < floor <= high:
            return fast + (floor - low) / (high - low) * (slow - fast)
    return corners[0][0]


__all__ = ["Asked", "Imagined", "Simulating", "best_way", "cheapest"]
