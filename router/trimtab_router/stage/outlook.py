"""What a stage expects: how long its batches take, and those of the stages after it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.spec import OperatingPoint, Stage
from trimtab_router.stage.endings import Answered
from trimtab_router.stage.policies.view import Point, least_seconds
from trimtab_router.stage.service_time import WEIGHT, Key, ServiceTimes, wait_for_others
from trimtab_router.stage.slot import Parcel

TYPICAL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Carries:
    """Rows computed at a time, and the seconds of it."""

    rows: int
    seconds: float


class Outlook:
    """The service times of one stage under its plan, and its place before others.

    Args:
        stage: the stage.
        plan: what it should run at first.
        falls_back: whether batches may run at the plan's other points too.
    """

    def __init__(self, stage: Stage, plan: StagePlan, *, falls_back: bool) -> None:
        self.stage = stage
        self._falls_back = falls_back
        self._points: dict[str, tuple[Point, ...]] = {}
        self._most_rows: dict[str, int] = {}
        self.times = ServiceTimes()
        self.followers: tuple[Outlook, ...] = ()
        self.variant = plan.variant
        """What the stage runs now."""
        self._compute_times = ServiceTimes()
        self._typical_rows = 1.0
        self.follow(plan)

    def follow(self, plan: StagePlan) -> None:
        """Take a new plan."""
        self.plan = plan
        self._points, self._most_rows = {}, {}
        for point in plan.points:
            self.times.set_profile((plan.variant, point.name), point.service_seconds)

    def points(self, variant: str) -> tuple[Point, ...]:
        """The operating points batches of this variant may run at, preferred first: the plan's, else its first."""
        found = self._points.get(variant)
        if found is None:
            found = self._points[variant] = tuple(self._allowed(variant))
        return found

    def most_rows(self, variant: str) -> int:
        """The most rows of a batch: as planned, as far as the variant takes them."""
        found = self._most_rows.get(variant)
        if found is None:
            most = self.stage.variant(variant).max_batch_size
            found = self._most_rows[variant] = min(self.plan.batch_size, most)
        return found

    def _allowed(self, variant: str) -> Iterator[Point]:
        if variant != self.plan.variant:
            names = [self.stage.variant(variant).points[0].name]
        elif self._falls_back:  # a point nothing is known of would seem to cost nothing
            names = [self.plan.operating_point, *(point.name for point in self.plan.fallbacks if point.service_seconds)]
        else:
            names = [self.plan.operating_point]
        for name in names:
            point = self.stage.variant(variant).point(name)
            yield Point(name, point.accuracy, partial(self.times.predict, (variant, name)), self._reads(point))

    def _reads(self, point: OperatingPoint) -> frozenset[str] | None:
        """The inputs that batches of a point take along: those it reads, and those the stage cannot run without."""
        if not point.modalities:
            return None
        return frozenset(point.modalities) | {declared.name for declared in self.stage.inputs if not declared.optional}

    def key(self, variant: str) -> Key:
        """What a batch of this variant runs at best."""
        return variant, self.points(variant)[0].name

    def service_seconds(self, rows: int) -> float:
        """Predicted seconds of a batch of so many rows at the fastest point allowed; 0 where nothing is known."""
        return least_seconds(self._points.get(self.variant) or self.points(self.variant), rows)

    def typical_seconds(self) -> float:
        """Predicted seconds of a batch as they have been lately."""
        return self.service_seconds(round(self._typical_rows))

    def later_seconds(self) -> float:
        """Predicted seconds of the stages after this one, along the longest path and without queueing."""
        return max((stage.typical_seconds() + stage.later_seconds() for stage in self.followers), default=0.0)

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self.times.ratio(self.key(self.variant))

    def compute_seconds(self, parcel: Parcel) -> float:
        """How long its replica should compute a batch; 0 where nothing is known."""
        return self._compute_times.expect(parcel.key, parcel.rows)

    def departed(self, rows: int) -> None:
        """A batch of so many rows left."""
        self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)

    def learn(self, parcel: Parcel, answer: Answered, now: float) -> tuple[float, float]:
        """Take note of how long a batch took, from when its replica had nothing else to do.

        Returns:
            These seconds, and observed over profiled service time as of now.
        """
        slot, key = parcel.slot, parcel.key
        seconds = now - max(parcel.departed_at, slot.completed_at)
        others = 0.0
        if answer.waited_seconds is not None:
            others = wait_for_others(
                answer.waited_seconds, parcel.departed_at, slot.completed_at, slot.transfer_seconds
            )
        self.times.observe_wait(others)
        self.times.observe(key, parcel.rows, max(seconds - others, 0.0))
        if answer.compute_seconds is not None:
            self._compute_times.observe(key, parcel.rows, answer.compute_seconds)
            if parcel.found_idle:
                transfer_seconds = max(seconds - others - answer.compute_seconds, 0.0)
                slot.transfer_seconds += WEIGHT * (transfer_seconds - slot.transfer_seconds)
        return seconds, self.times.ratio(key)

    def doubt(self, variant: str) -> None:
        """All were dropped in front of an idle replica: were the predictions right?"""
        for point in self.points(variant):
            self.times.doubt((variant, point.name))
        for stage in self.followers:
            stage.doubt(stage.variant)
