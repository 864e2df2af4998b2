"""What a stage expects: how long its batches take, and those of the stages after it. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_pipelines.plan import PointPlan, StagePlan, unmeasured_point_plan
from trimtab_pipelines.prefill_time import prefill_seconds
from trimtab_pipelines.shadow_price import observed_shadow_price
from trimtab_pipelines.stages import Stage
from trimtab_router.scheduling.batch_outcomes import Completed
from trimtab_router.scheduling.policies.interface import Escalation, Point, answerable_from, least_seconds
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.service_time import WEIGHT, Key, ServiceTimes, wait_for_others
from trimtab_router.scheduling.stage_request import StageRequest

TYPICAL_WEIGHT = 0.1
SHADOW_PRICE_STEP = 0.05
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

    def __init__(self, stage: Stage, plan: StagePlan, *, uses_fallbacks: bool) -> None:
        self.stage = stage
        self._falls_back = uses_fallbacks
        self._points: dict[tuple[str, int], tuple[Point, ...]] = {}
        self._registered: dict[str, dict[str, Mapping[str, Accuracy]]] = {}
        self._reregistered: set[tuple[str, str]] = set()
        """Variants and tasks that were deleted and joined again since the plan came: it may tell of the other one."""
        self._basis: AccuracyBasis = "Expected"
        self._unregistered: set[tuple[str, str]] = set()
        """Variants and tasks that plans made before may still tell of."""
        self._max_batch_rows: dict[str, int] = {}
        self._shadow_prices: dict[int, float] = {}
        """Of time, by the step of the service ratio."""
        self.service_times = ServiceTimes()
        self.downstream: tuple[LatencyModel, ...] = ()
        self.variant = plan.variant
        """What the stage runs now."""
        self._compute_times = ServiceTimes()
        self._typical_rows = 1.0
        self.apply_plan(plan)

    def apply_plan(self, plan: StagePlan) -> None:
        """Take a new plan."""
        self.plan = plan
        self._usual_prefill_seconds = prefill_seconds(plan.prefill_seconds, plan.prompt_tokens)
        self._points, self._max_batch_rows, self._shadow_prices = {}, {}, {}
        self._reregistered = set()
        for point in plan.points:
            self.service_times.set_profile((plan.variant, point.name), point.service_seconds)

    def register_task(
        self, variant: str, task: str, accuracies: Mapping[str, Accuracy], basis: AccuracyBasis = "Expected"
    ) -> None:
        """Know a task that joined a variant.

        Args:
            variant: which.
            task: its name.
            judged: how accurate operating points are on it, where that is known.
            basis: which figure of these counts.
        """
        joined = self._registered.setdefault(variant, {})
        if joined.get(task) == accuracies and self._basis == basis:
            return
        joined[task], self._basis, self._points = accuracies, basis, {}
        if (variant, task) in self._unregistered:
            self._unregistered.discard((variant, task))
            self._reregistered.add((variant, task))

    def unregister_task(self, variant: str, task: str) -> None:
        """Forget a task that joined, whatever plans still tell of it."""
        self._registered.get(variant, {}).pop(task, None)
        self._unregistered.add((variant, task))
        self._points = {}

    def is_unregistered(self, task: str) -> bool:
        """Whether a task was deleted that replicas may still tell of."""
        return (self.variant, task) in self._unregistered

    def has_task(self, task: str) -> bool:
        """Whether any variant has a task beside those of its weights."""
        declared = (own.name for variant in self.stage.variants for own in variant.loaded_tasks)
        return task in declared or any(task in joined for joined in self._registered.values())

    def registered_accuracies(self) -> dict[str, dict[str, dict[str, Accuracy]]]:
        """How accurate operating points are on tasks that joined: by variant, point and task."""
        found: dict[str, dict[str, dict[str, Accuracy]]] = {}
        for variant, tasks in self._registered.items():
            for task, by_point in tasks.items():
                for point, accuracy in by_point.items():
                    found.setdefault(variant, {}).setdefault(point, {})[task] = accuracy
        return found

    def points(self, variant: str, concurrent: int = 0) -> tuple[Point, ...]:
        """The operating points batches of this variant may run at, preferred first: the plan's, else its first.

        Their seconds are those beside so many others whose prompts the same replica reads.
        """
        found = self._points.get((variant, concurrent))
        if found is None:
            found = self._points[variant, concurrent] = tuple(self._allowed_points(variant, concurrent))
        return found

    def max_batch_rows(self, variant: str) -> int:
        """The most rows of a batch: as planned, as far as the variant takes them; each leaves alone to be written."""
        found = self._max_batch_rows.get(variant)
        if found is None:
            most = 1 if self.stage.generates else self.stage.variant(variant).max_batch_size
            found = self._max_batch_rows[variant] = min(self.plan.batch_size, most)
        return found

    def _allowed_points(self, variant: str, beside: int) -> list[Point]:
        """Where some leave inputs out, those that read all say so: a request without one is none of theirs."""
        found, inputs = list(self._list_points(variant, beside)), self.stage.inputs
        every = frozenset(given.name for given in inputs)
        declared = (point.batch_inputs(inputs) for point in self.stage.variant(variant).points)
        if {point.inputs for point in found} | set(declared) <= {None, every}:
            return found
        return [replace(point, inputs=every) if point.inputs is None else point for point in found]

    def _list_points(self, variant: str, beside: int) -> Iterator[Point]:
        declared = self.stage.variant(variant)
        if variant != self.plan.variant:
            listed: tuple[PointPlan, ...] = (unmeasured_point_plan(declared.points[0]),)
        else:
            listed = self._known_points()
        for planned in listed:
            point = declared.point(planned.name)
            if planned.inputs:
                point = point.model_copy(update={"modalities": planned.inputs})
            yield Point(
                planned.name,
                planned.accuracy,
                partial(self.service_times.predict, (variant, planned.name), concurrent=beside),
                point.batch_inputs(self.stage.inputs),
                self._accuracies(variant, planned),
                profiled=self.service_times.profiled((variant, planned.name), self.max_batch_rows(variant)),
                escalations=tuple(Escalation(**dict(look)) for look in planned.escalations),
            )

    def _accuracies(self, variant: str, point: PointPlan) -> dict[str, float]:
        """Of a point by task: as planned, and those of tasks that no plan tells of yet."""
        other = self._unregistered | self._reregistered
        planned = {task: one for task, one in point.accuracy_by_task.items() if (variant, task) not in other}
        joined = self._registered.get(variant, {}).items()
        return {
            task: accuracies[point.name].on(self._basis) for task, accuracies in joined if point.name in accuracies
        } | planned

    def _known_points(self) -> tuple[PointPlan, ...]:
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
        less = self.stage.point_for_inputs(self.variant, point.name, given)
        return point.accuracy_for(task) if less is None else less.measured_accuracy(task).value

    def tasks(self) -> frozenset[str]:
        """The tasks that are known, by their accuracies or by name."""
        accuracies = frozenset(task for point in self.points(self.variant) for task in point.accuracy_by_task)
        return accuracies | self.own_tasks()

    def own_tasks(self) -> frozenset[str]:
        """The tasks that the variant declares beside those of its weights, and those that joined it."""
        declared = frozenset(task.name for task in self.stage.variant(self.variant).loaded_tasks)
        return declared.union(self._registered.get(self.variant, ()))

    def reaches(self, request: StageRequest) -> bool:
        """Whether a point keeps the floor of a work."""
        return (
            not request.accuracy_floor
            or self.best_accuracy(request.options.task, request.inputs) >= request.accuracy_floor - _ROUNDING
        )

    def least_seconds(self, request: StageRequest, rows: int, concurrent: int = 0) -> float:
        """Predicted seconds of a batch of so many rows at the fastest point that keeps the floor of a work."""
        if not request.accuracy_floor:
            return self.service_seconds(rows, concurrent)
        points = self.points(self.variant, concurrent)
        reaching = [point for point in answerable_from(points, request.inputs) or points if point.reaches(request)]
        return least_seconds(reaching or points, rows)

    def service_seconds(self, rows: int, concurrent: int = 0) -> float:
        """Predicted seconds of a batch of so many rows at the fastest point allowed; 0 where nothing is known."""
        return least_seconds(self.points(self.variant, concurrent), rows)

    def prefill_seconds(self, tokens: float) -> float:
        """Predicted seconds that a prompt takes beyond what is predicted for all; below 0 where it is shorter.

        0 where nobody knows how many tokens it has, or how long they take.
        """
        beyond = self._profiled_beyond(tokens)
        return (
            max(beyond * self.service_times.ratio(self.key(self.variant)), -self.service_seconds(1)) if beyond else 0.0
        )

    def _profiled_beyond(self, tokens: float) -> float:
        plan = self.plan
        if not tokens or not plan.prefill_seconds or self.variant != plan.variant:
            return 0.0
        return prefill_seconds(plan.prefill_seconds, tokens) - self._usual_prefill_seconds

    def _normalize_to_usual_prompt(self, batch: Batch, seconds: float) -> float:
        """What a batch that took so long would have taken if its prompt were as long as those that are planned for."""
        beyond = self._profiled_beyond(batch.tokens)
        rows = max(batch.rows, min(batch.rows + batch.concurrent_prefills, self.plan.batch_size))
        profiled = self.service_times.profiled(batch.key, rows) if beyond else ()
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
        for stage in self.downstream:
            longest = max(longest, stage.typical_seconds() + stage.later_seconds())
        return longest

    @property
    def shadow_price(self) -> float:
        """Expected right answers that a second of a replica is worth to those yet to come, at the pace batches have."""
        step = round(log(self.service_times.stage_ratio) / SHADOW_PRICE_STEP)
        found = self._shadow_prices.get(step)
        if found is None:
            found = self._shadow_prices[step] = observed_shadow_price(self.plan, exp(step * SHADOW_PRICE_STEP))
        return found

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self.service_times.ratio(self.key(self.variant))

    def compute_seconds(self, batch: Batch) -> float:
        """How long its replica should compute a batch; 0 where nothing is known."""
        return self._compute_times.expect(batch.key, batch.rows)

    def on_dispatch(self, rows: int) -> None:
        """A batch of so many rows left, those counted that are read before it."""
        self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)

    def observe(self, batch: Batch, answer: Completed, now: float) -> tuple[float, float]:
        """Take note of how long a batch took, from when its replica had nothing else to do.

        Returns:
            These seconds, and observed over profiled service time as of now.
        """
        replica, key = batch.replica, batch.key
        seconds = now - max(batch.dispatched_at, replica.completed_at)
        others = 0.0
        if answer.replica_queue_seconds is not None:
            others = wait_for_others(
                answer.replica_queue_seconds, batch.dispatched_at, replica.completed_at, replica.transfer_seconds
            )
        self.service_times.observe_wait(others)
        own = max(seconds - others, 0.0)
        usual = self._normalize_to_usual_prompt(batch, own) if self.plan.prefill_seconds else own
        self.service_times.observe(key, batch.rows, usual, concurrent=batch.concurrent_prefills)
        if answer.compute_seconds is not None:
            self._compute_times.observe(key, batch.rows, answer.compute_seconds)
            if batch.found_idle:
                transfer_seconds = max(seconds - others - answer.compute_seconds, 0.0)
                replica.transfer_seconds += WEIGHT * (transfer_seconds - replica.transfer_seconds)
        return seconds, self.service_times.ratio(key)

    def relax(self, variant: str) -> None:
        """All were dropped in front of an idle replica: were the predictions right?"""
        self.service_times.relax([(variant, point.name) for point in self.points(variant)])
        for stage in self.downstream:
            stage.relax(stage.variant)
