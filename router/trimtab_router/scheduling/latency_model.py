"""What a stage expects: how long its batches take, and those of the stages after it. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_pipelines.plan import PointPlan, StagePlan, point_plan
from trimtab_pipelines.prefill_time import prefill_seconds
from trimtab_pipelines.shadow_price import repriced
from trimtab_pipelines.stages import Stage
from trimtab_router.scheduling.batch_outcomes import Completed
from trimtab_router.scheduling.policies.interface import Escalation, Point, answerable_from, least_seconds
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.service_time import WEIGHT, Key, ServiceTimes, wait_for_others
from trimtab_router.scheduling.stage_request import StageRequest

TYPICAL_WEIGHT = 0.1
PRICE_STEP = 0.05
"""Of the logarithm of service ratios: those in one step share a price of time, which takes a while to find."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """Rows computed at a time, and the seconds of it."""

    rows: int
    seconds: float


class LatencyModel:
    """The service times of one stage under its plan, and its place before others.

    Args:
        stage: the stage.
        plan: what it should run at first.
        falls_back: whether batches may run at the plan's other points too; more accurate ones may be needed anyway.
    """

    def __init__(self, stage: Stage, plan: StagePlan, *, falls_back: bool) -> None:
        self.stage = stage
        self._falls_back = falls_back
        self._points: dict[tuple[str, int], tuple[Point, ...]] = {}
        self._enrolled: dict[str, dict[str, Mapping[str, Accuracy]]] = {}
        self._newer: set[tuple[str, str]] = set()
        """Variants and tasks that were deleted and joined again since the plan came: it may tell of the other one."""
        self._basis: AccuracyBasis = "Expected"
        self._dismissed: set[tuple[str, str]] = set()
        """Variants and tasks that plans made before may still tell of."""
        self._most_rows: dict[str, int] = {}
        self._prices: dict[int, float] = {}
        """Of time, by the step of the service ratio."""
        self.times = ServiceTimes()
        self.followers: tuple[LatencyModel, ...] = ()
        self.variant = plan.variant
        """What the stage runs now."""
        self._compute_times = ServiceTimes()
        self._typical_rows = 1.0
        self.follow(plan)

    def follow(self, plan: StagePlan) -> None:
        """Take a new plan."""
        self.plan = plan
        self._usual_reading_seconds = prefill_seconds(plan.prefill_seconds, plan.prompt_tokens)
        self._points, self._most_rows, self._prices = {}, {}, {}
        self._newer = set()
        for point in plan.points:
            self.times.set_profile((plan.variant, point.name), point.service_seconds)

    def enrol(self, variant: str, task: str, judged: Mapping[str, Accuracy], basis: AccuracyBasis = "Expected") -> None:
        """Know a task that joined a variant.

        Args:
            variant: which.
            task: its name.
            judged: how accurate operating points are on it, where that is known.
            basis: which figure of these counts.
        """
        joined = self._enrolled.setdefault(variant, {})
        if joined.get(task) == judged and self._basis == basis:
            return
        joined[task], self._basis, self._points = judged, basis, {}
        if (variant, task) in self._dismissed:
            self._dismissed.discard((variant, task))
            self._newer.add((variant, task))

    def dismiss(self, variant: str, task: str) -> None:
        """Forget a task that joined, whatever plans still tell of it."""
        self._enrolled.get(variant, {}).pop(task, None)
        self._dismissed.add((variant, task))
        self._points = {}

    def dismissed(self, task: str) -> bool:
        """Whether a task was deleted that replicas may still tell of."""
        return (self.variant, task) in self._dismissed

    def knows(self, task: str) -> bool:
        """Whether any variant has a task beside those of its weights."""
        declared = (own.name for variant in self.stage.variants for own in variant.present_tasks)
        return task in declared or any(task in joined for joined in self._enrolled.values())

    def joined(self) -> dict[str, dict[str, dict[str, Accuracy]]]:
        """How accurate operating points are on tasks that joined: by variant, point and task."""
        found: dict[str, dict[str, dict[str, Accuracy]]] = {}
        for variant, tasks in self._enrolled.items():
            for task, by_point in tasks.items():
                for point, accuracy in by_point.items():
                    found.setdefault(variant, {}).setdefault(point, {})[task] = accuracy
        return found

    def points(self, variant: str, beside: int = 0) -> tuple[Point, ...]:
        """The operating points batches of this variant may run at, preferred first: the plan's, else its first.

        Their seconds are those beside so many others whose prompts the same replica reads.
        """
        found = self._points.get((variant, beside))
        if found is None:
            found = self._points[variant, beside] = tuple(self._allowed(variant, beside))
        return found

    def most_rows(self, variant: str) -> int:
        """The most rows of a batch: as planned, as far as the variant takes them; each leaves alone to be written."""
        found = self._most_rows.get(variant)
        if found is None:
            most = 1 if self.stage.generates else self.stage.variant(variant).max_batch_size
            found = self._most_rows[variant] = min(self.plan.batch_size, most)
        return found

    def _allowed(self, variant: str, beside: int) -> list[Point]:
        """Where some leave inputs out, those that read all say so: a request without one is none of theirs."""
        found, inputs = list(self._listed(variant, beside)), self.stage.inputs
        every = frozenset(given.name for given in inputs)
        declared = (point.carried(inputs) for point in self.stage.variant(variant).points)
        if {point.reads for point in found} | set(declared) <= {None, every}:
            return found
        return [replace(point, reads=every) if point.reads is None else point for point in found]

    def _listed(self, variant: str, beside: int) -> Iterator[Point]:
        declared = self.stage.variant(variant)
        if variant != self.plan.variant:
            listed: tuple[PointPlan, ...] = (point_plan(declared.points[0]),)
        else:
            listed = self._known()
        for planned in listed:
            point = declared.point(planned.name)
            if planned.inputs:
                point = point.model_copy(update={"modalities": planned.inputs})
            yield Point(
                planned.name,
                planned.accuracy,
                partial(self.times.predict, (variant, planned.name), beside=beside),
                point.carried(self.stage.inputs),
                self._accuracies(variant, planned),
                profiled=self.times.profiled((variant, planned.name), self.most_rows(variant)),
                looks=tuple(Escalation(**dict(look)) for look in planned.escalations),
            )

    def _accuracies(self, variant: str, point: PointPlan) -> dict[str, float]:
        """Of a point by task: as planned, and those of tasks that no plan tells of yet."""
        other = self._dismissed | self._newer
        told = {task: one for task, one in point.accuracy_by_task.items() if (variant, task) not in other}
        joined = self._enrolled.get(variant, {}).items()
        return {task: judged[point.name].on(self._basis) for task, judged in joined if point.name in judged} | told

    def _known(self) -> tuple[PointPlan, ...]:
        """The plan's points but those of which nothing is known: they would seem to cost nothing.

        Where batches stay with the planned one, better ones serve only who needs them: the least of them first.
        """
        own = self.plan.operating_point
        if self._falls_back:
            return tuple(point for point in self.plan.points if point.service_seconds or point.name == own)
        return (self.plan.planned, *(point for point in reversed(self.plan.upgrades) if point.service_seconds))

    def key(self, variant: str) -> Key:
        """What a batch of this variant runs as planned."""
        planned = self.plan.operating_point if variant == self.plan.variant else self.points(variant)[0].name
        return variant, planned

    def best_accuracy(self, task: str, given: Collection[str]) -> float:
        """The most that batches of what runs now may be expected to give for rows of a task with these inputs."""
        whole = answerable_from(self.points(self.variant), given)
        if whole:
            return max(point.accuracy_for(task) for point in whole)
        return max(self._accuracy_from(point, task, given) for point in self.points(self.variant))

    def _accuracy_from(self, point: Point, task: str, given: Collection[str]) -> float:
        less = self.stage.reading_less(self.variant, point.name, given)
        return point.accuracy_for(task) if less is None else less.judged(task).value

    def tasks(self) -> frozenset[str]:
        """The tasks that are known, by their accuracies or by name."""
        judged = frozenset(task for point in self.points(self.variant) for task in point.accuracy_by_task)
        return judged | self.own_tasks()

    def own_tasks(self) -> frozenset[str]:
        """The tasks that the variant declares beside those of its weights, and those that joined it."""
        declared = frozenset(task.name for task in self.stage.variant(self.variant).present_tasks)
        return declared.union(self._enrolled.get(self.variant, ()))

    def reaches(self, work: StageRequest) -> bool:
        """Whether a point keeps the floor of a work."""
        return (
            not work.accuracy_floor
            or self.best_accuracy(work.wish.task, work.inputs) >= work.accuracy_floor - _ROUNDING
        )

    def least_seconds(self, work: StageRequest, rows: int, beside: int = 0) -> float:
        """Predicted seconds of a batch of so many rows at the fastest point that keeps the floor of a work."""
        if not work.accuracy_floor:
            return self.service_seconds(rows, beside)
        points = self.points(self.variant, beside)
        reaching = [point for point in answerable_from(points, work.inputs) or points if point.reaches(work)]
        return least_seconds(reaching or points, rows)

    def service_seconds(self, rows: int, beside: int = 0) -> float:
        """Predicted seconds of a batch of so many rows at the fastest point allowed; 0 where nothing is known."""
        return least_seconds(self.points(self.variant, beside), rows)

    def prefill_seconds(self, tokens: float) -> float:
        """Predicted seconds that a prompt takes beyond what is predicted for all; below 0 where it is shorter.

        0 where nobody knows how many tokens it has, or how long they take.
        """
        beyond = self._profiled_beyond(tokens)
        return max(beyond * self.times.ratio(self.key(self.variant)), -self.service_seconds(1)) if beyond else 0.0

    def _profiled_beyond(self, tokens: float) -> float:
        plan = self.plan
        if not tokens or not plan.prefill_seconds or self.variant != plan.variant:
            return 0.0
        return prefill_seconds(plan.prefill_seconds, tokens) - self._usual_reading_seconds

    def _of_usual(self, parcel: Batch, seconds: float) -> float:
        """What a batch that took so long would have taken if its prompt were as long as those that are planned for."""
        beyond = self._profiled_beyond(parcel.tokens)
        rows = max(parcel.rows, min(parcel.rows + parcel.beside, self.plan.batch_size))
        profiled = self.times.profiled(parcel.key, rows) if beyond else ()
        if not profiled:
            return seconds
        usual = profiled[-1]
        return seconds * usual / (usual + max(beyond, -0.9 * usual))

    def typical_seconds(self) -> float:
        """Predicted seconds of a batch as they have been lately."""
        rows = round(self._typical_rows)
        return self.service_seconds(1, rows - 1) if self.stage.generates else self.service_seconds(rows)

    def later_seconds(self) -> float:
        """Predicted seconds of the stages after this one, along the longest path and without queueing."""
        longest = 0.0
        for stage in self.followers:
            longest = max(longest, stage.typical_seconds() + stage.later_seconds())
        return longest

    @property
    def shadow_price(self) -> float:
        """Expected right answers that a second of a replica is worth to those yet to come, at the pace batches have."""
        step = round(log(self.times.stage_ratio) / PRICE_STEP)
        found = self._prices.get(step)
        if found is None:
            found = self._prices[step] = repriced(self.plan, exp(step * PRICE_STEP))
        return found

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self.times.ratio(self.key(self.variant))

    def compute_seconds(self, parcel: Batch) -> float:
        """How long its replica should compute a batch; 0 where nothing is known."""
        return self._compute_times.expect(parcel.key, parcel.rows)

    def departed(self, rows: int) -> None:
        """A batch of so many rows left, those counted that are read before it."""
        self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)

    def learn(self, parcel: Batch, answer: Completed, now: float) -> tuple[float, float]:
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
        own = max(seconds - others, 0.0)
        usual = self._of_usual(parcel, own) if self.plan.prefill_seconds else own
        self.times.observe(key, parcel.rows, usual, beside=parcel.beside)
        if answer.compute_seconds is not None:
            self._compute_times.observe(key, parcel.rows, answer.compute_seconds)
            if parcel.found_idle:
                transfer_seconds = max(seconds - others - answer.compute_seconds, 0.0)
                slot.transfer_seconds += WEIGHT * (transfer_seconds - slot.transfer_seconds)
        return seconds, self.times.ratio(key)

    def doubt(self, variant: str) -> None:
        """All were dropped in front of an idle replica: were the predictions right?"""
        self.times.doubt([(variant, point.name) for point in self.points(variant)])
        for stage in self.followers:
            stage.doubt(stage.variant)
