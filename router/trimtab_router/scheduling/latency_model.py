"""Latency model of one stage: predicted service times under the plan, downstream stages included."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, inf, log
from typing import NamedTuple

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyBasis
from trimtab_pipelines.plan import PointPlan, StagePlan, unmeasured_point_plan
from trimtab_pipelines.profile import prefill_seconds
from trimtab_pipelines.shadow_price import observed_shadow_price
from trimtab_pipelines.stages import Stage
from trimtab_router.scheduling.policies.interface import Escalation, Point, answerable_from, least_seconds
from trimtab_router.scheduling.replica_slots import Batch, Completed
from trimtab_router.scheduling.service_time import WEIGHT, Key, RunningMean, ServiceTimes, wait_for_others
from trimtab_router.scheduling.stage_request import StageRequest
from trimtab_router.scheduling.winsorizer import Winsorizer

TYPICAL_WEIGHT = 0.1
MARGIN_SHARE = 0.2  # of planned seconds, for the way to the client and batches that take longer than predicted
QUEUEING_SHARE = 0.5  # of the planned seconds of downstream stages, which include the longest wait: at least reserved
QUEUEING_SPREADS = 2.0  # by which recent queueing may exceed its mean
SHADOW_PRICE_STEP = 0.05  # of the log of the service ratio, in which the price, slow to compute, is shared
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StageCapacity:
    """Rows that a stage computes at a time, and the seconds they take."""

    rows: int
    seconds: float


class Prediction(NamedTuple):
    """Seconds of a full batch, of the rows of one request, and of the downstream stages."""

    occupancy_seconds: float
    service_seconds: float
    later_seconds: float


class LatencyModel:
    """Operating points and service times of one stage. `uses_fallbacks`: less accurate points than planned may run."""

    def __init__(self, stage: Stage, plan: StagePlan, *, uses_fallbacks: bool, concurrent_rows: bool) -> None:
        self.stage = stage
        self._falls_back = uses_fallbacks
        self._concurrent_rows = concurrent_rows
        self._residence_seconds = 0.0
        self._residences = Winsorizer()
        self._points: dict[tuple[str, int, frozenset[str]], tuple[Point, ...]] = {}
        self._ready: frozenset[str] = frozenset()
        self.other_variants: frozenset[str] = frozenset()  # whose points the plan lists beside its own variant's
        self._registered: dict[str, dict[str, Mapping[str, Accuracy]]] = {}
        self._reregistered: set[tuple[str, str]] = set()  # tasks that the plan may confuse with older ones
        self._basis: AccuracyBasis = "Expected"
        self._unregistered: set[tuple[str, str]] = set()  # variants and tasks that an older plan may still mention
        self._max_batch_rows: dict[str, int] = {}
        self._shadow_prices: dict[int, float] = {}  # by step of the service ratio
        self.service_times = ServiceTimes()
        self.variant = plan.variant
        self.max_prompt_tokens = inf
        self._downstream: tuple[LatencyModel, ...] = ()
        self.upstream: list[LatencyModel] = []
        self._predictions: dict[tuple[int, int], Prediction] = {}  # since the last observation
        self._later_seconds: float | None = None
        self._planned_later_seconds: float | None = None
        self._typical_rows = 1.0
        self._queueing = RunningMean()  # of the most urgent rows of batches, from their arrival
        self.apply_plan(plan)

    def apply_plan(self, plan: StagePlan) -> None:
        self.plan = plan
        self.full_batch_rows = 1 if self._concurrent_rows else plan.largest_batch  # 1: replicas serve rows concurrently
        self._usual_prefill_seconds = prefill_seconds(plan.prefill_seconds, plan.prompt_tokens)
        self._points, self._max_batch_rows, self._shadow_prices = {}, {}, {}
        self._reregistered = set()
        self.forget_predictions()
        self.forget_planned()
        self.other_variants = frozenset(point.variant for point in plan.points if point.variant) - {plan.variant}
        for point in plan.points:
            self.service_times.set_profile(point.key(plan.variant), point.service_seconds)
        if self._concurrent_rows:
            self.service_times.set_weights()

    def set_ready_variants(self, ready_by_replica: Iterable[frozenset[str]]) -> None:
        self._ready = frozenset().union(*ready_by_replica)

    def offers(self, variant: str) -> bool:
        """Return whether a variant is ready on any replica."""
        return variant in self._ready

    def register_task(
        self, variant: str, task: str, accuracies: Mapping[str, Accuracy], basis: AccuracyBasis = "Expected"
    ) -> None:
        joined = self._registered.setdefault(variant, {})
        if joined.get(task) == accuracies and self._basis == basis:
            return
        joined[task], self._basis, self._points = accuracies, basis, {}
        if (variant, task) in self._unregistered:
            self._unregistered.discard((variant, task))
            self._reregistered.add((variant, task))

    def unregister_task(self, variant: str, task: str) -> None:
        """Remove a registered task, even if plans still mention it."""
        self._registered.get(variant, {}).pop(task, None)
        self._unregistered.add((variant, task))
        self._points = {}

    def is_unregistered(self, task: str) -> bool:
        """Return whether replicas may still report this deleted task."""
        return (self.variant, task) in self._unregistered

    def has_task(self, task: str) -> bool:
        declared = (variant.task_names for variant in self.stage.variants)
        return any(task in names for names in declared) or any(task in joined for joined in self._registered.values())

    def registered_accuracies(self) -> dict[str, dict[str, dict[str, Accuracy]]]:
        accuracies_by_point: dict[str, dict[str, dict[str, Accuracy]]] = {}
        for variant, tasks in self._registered.items():
            for task, by_point in tasks.items():
                for point, accuracy in by_point.items():
                    accuracies_by_point.setdefault(variant, {}).setdefault(point, {})[task] = accuracy
        return accuracies_by_point

    def points(self, variant: str, concurrent: int = 0, ready: frozenset[str] | None = None) -> tuple[Point, ...]:
        """Return the points for a replica that runs a variant and prefills `concurrent` other prompts, preferred first.

        The points of other variants are those that are `ready`, or that any replica offers if it is None.
        """
        others = self.other_variants
        if others:
            others &= self._ready if ready is None else ready
        key = variant, concurrent, others
        points = self._points.get(key)
        if points is None:
            points = self._points[key] = tuple(self._allowed_points(variant, concurrent, others | {variant}))
        return points

    def max_batch_rows(self, variant: str) -> int:
        rows = self._max_batch_rows.get(variant)
        if rows is None:
            limit = self.stage.variant(variant).max_batch_size
            rows = self._max_batch_rows[variant] = min(self.full_batch_rows, limit)
        return rows

    def occupancy_seconds(self) -> float:
        """Expected seconds of a full batch, or of a concurrent row to its last token; 0 if unknown."""
        return self._residence_seconds if self._concurrent_rows else self.service_seconds(self.plan.largest_batch)

    def observe_residence(self, seconds: float) -> None:
        weight = WEIGHT if self._residence_seconds else 1.0
        self._residence_seconds += weight * (self._residences.clip(seconds) - self._residence_seconds)
        self.forget_predictions()

    def _allowed_points(self, variant: str, concurrent: int, ready: frozenset[str]) -> list[Point]:
        """Return the points; if one excludes an input, those that read all inputs list them."""
        points, inputs = list(self._list_points(variant, concurrent, ready)), self.stage.inputs
        every = frozenset(given.name for given in inputs)
        declared = (point.batch_inputs(inputs) for name in ready for point in self.stage.variant(name).points)
        if {point.inputs for point in points} | set(declared) <= {None, every}:
            return points
        return [replace(point, inputs=every) if point.inputs is None else point for point in points]

    def _list_points(self, variant: str, concurrent: int, ready: frozenset[str]) -> Iterator[Point]:
        listed = {key: point for point in self._known_points() if (key := point.key(self.plan.variant))[0] in ready}
        if not any(owner == variant for owner, _ in listed):
            unmeasured = unmeasured_point_plan(self.stage.variant(variant).points[0])
            listed = {(variant, unmeasured.name): unmeasured}
        for key, planned in listed.items():
            point = self.stage.variant(key[0]).point(planned.name)
            if planned.inputs:
                point = point.replace(modalities=planned.inputs)
            escalations = ((look, look.target(key[0])[0]) for look in planned.escalations)
            yield Point(
                planned.name,
                planned.accuracy,
                partial(self.service_times.predict, key, concurrent=concurrent),
                point.batch_inputs(self.stage.inputs),
                self._accuracies(key[0], planned),
                profiled=self.service_times.profiled(key, self.max_batch_rows(variant)),
                escalations=tuple(Escalation(**dict(look) | {"variant": owner}) for look, owner in escalations),
                variant=key[0],
                expected_seconds=partial(self.service_times.expect, key),
            )

    def _accuracies(self, variant: str, point: PointPlan) -> dict[str, float]:
        other = self._unregistered | self._reregistered
        planned = {task: one for task, one in point.accuracy_by_task.items() if (variant, task) not in other}
        joined = self._registered.get(variant, {}).items()
        return {
            task: accuracies[point.name].on(self._basis) for task, accuracies in joined if point.name in accuracies
        } | planned

    def _known_points(self) -> tuple[PointPlan, ...]:
        """Return the planned points with known service times; without fallbacks, the better ones ascend in accuracy."""
        own = self.plan.operating_point
        if self._falls_back:
            return tuple(point for point in self.plan.points if point.service_seconds or point.name == own)
        return (self.plan.planned, *(point for point in reversed(self.plan.upgrades) if point.service_seconds))

    def key(self, variant: str) -> Key:
        planned = self.plan.operating_point if variant == self.plan.variant else self.points(variant)[0].name
        return variant, planned

    def best_accuracy(self, task: str, given: Collection[str]) -> float:
        whole = answerable_from(self.points(self.variant), given)
        if whole:
            return max(point.accuracy_for(task) for point in whole)
        return max(self._accuracy_from(point, task, given) for point in self.points(self.variant))

    def _accuracy_from(self, point: Point, task: str, given: Collection[str]) -> float:
        less = self.stage.point_for_inputs(point.variant, point.name, given)
        return point.accuracy_for(task) if less is None else less.measured_accuracy(task).value

    def tasks(self) -> frozenset[str]:
        accuracies = frozenset(task for point in self.points(self.variant) for task in point.accuracy_by_task)
        return accuracies | self.own_tasks()

    def own_tasks(self) -> frozenset[str]:
        return self.stage.variant(self.variant).task_names.union(self._registered.get(self.variant, ()))

    def reaches(self, request: StageRequest) -> bool:
        return (
            not request.accuracy_floor
            or self.best_accuracy(request.options.task, request.inputs) >= request.accuracy_floor - _ROUNDING
        )

    def least_seconds(self, request: StageRequest, rows: int, concurrent: int = 0) -> float:
        if not request.accuracy_floor:
            return self.service_seconds(rows, concurrent)
        points = self.points(self.variant, concurrent)
        reaching = [point for point in answerable_from(points, request.inputs) or points if point.reaches(request)]
        return least_seconds(reaching or points, rows)

    def service_seconds(self, rows: int, concurrent: int = 0) -> float:
        return least_seconds(self.points(self.variant, concurrent), rows)

    def predict(self, rows: int, concurrent: int) -> Prediction:
        """Predict what a request of these rows meets."""
        key = rows, concurrent
        prediction = self._predictions.get(key)
        if prediction is None:
            seconds = self.occupancy_seconds(), self.service_seconds(rows, concurrent), self.later_seconds()
            prediction = self._predictions[key] = Prediction(*seconds)
        return prediction

    def set_downstream(self, models: Sequence["LatencyModel"]) -> None:
        self._downstream = tuple(models)
        for model in models:
            model.upstream.append(self)

    def forget_predictions(self) -> None:
        """Compute predictions again. Call it after each change of what they depend on."""
        if self._later_seconds is None and not self._predictions:
            return  # nor has a model upstream any, which would have asked this one
        self._predictions, self._later_seconds = {}, None
        for model in self.upstream:
            model.forget_predictions()

    def forget_planned(self) -> None:
        """Forget what follows from plans alone."""
        self._planned_later_seconds = None
        for model in self.upstream:
            model.forget_planned()

    def prefill_seconds(self, tokens: float) -> float:
        """Predicted seconds of a prompt beyond, or below, those of the planned length; 0 if unknown.

        Also 0 above `max_prompt_tokens`: a replica rejects such a prompt at once.
        """
        beyond = self._profiled_beyond(tokens) if tokens <= self.max_prompt_tokens else 0.0
        return (
            max(beyond * self.service_times.ratio(self.key(self.variant)), -self.service_seconds(1)) if beyond else 0.0
        )

    def _profiled_beyond(self, tokens: float) -> float:
        plan = self.plan
        if not tokens or not plan.prefill_seconds or self.variant != plan.variant:
            return 0.0
        return prefill_seconds(plan.prefill_seconds, tokens) - self._usual_prefill_seconds

    def _normalize_to_usual_prompt(self, batch: Batch, seconds: float) -> float:
        """Return what a batch would have taken with a prompt of the planned length."""
        beyond = self._profiled_beyond(batch.tokens)
        usual = self.service_times.profiled_beside(batch.key, batch.rows, batch.concurrent_prefills) if beyond else 0.0
        if not usual:
            return seconds
        return seconds * usual / (usual + max(beyond, -0.9 * usual))

    def typical_seconds(self) -> float:
        rows = round(self._typical_rows)
        return self.service_seconds(1, rows - 1) if self._concurrent_rows else self.service_seconds(rows)

    def later_seconds(self) -> float:
        """Return the predicted seconds of the downstream stages, along the longest path and without queueing."""
        if self._later_seconds is None:
            downstream = [stage.typical_seconds() + stage.later_seconds() for stage in self._downstream]
            self._later_seconds = max(downstream) if downstream else 0.0
        return self._later_seconds

    def reserved_seconds(self, later_seconds: float) -> float:
        """Return what rows leave beyond `later_seconds`: recent queueing of the downstream stages, and a margin.

        With queueing they leave at least a share of the planned seconds, and at most all.
        """
        planned = self.planned_later_seconds()
        later = max(QUEUEING_SHARE * planned, min(later_seconds + self.later_queueing_seconds(), planned))
        return max(later - later_seconds, 0.0) + MARGIN_SHARE * (self.plan.latency_seconds + planned)

    def later_queueing_seconds(self) -> float:
        downstream = [stage.queueing_seconds + stage.later_queueing_seconds() for stage in self._downstream]
        return max(downstream, default=0.0)

    @property
    def queueing_seconds(self) -> float:
        """Seconds for which rows wait in the queue, as recently observed."""
        return self._queueing.mean + QUEUEING_SPREADS * self._queueing.spread

    def planned_later_seconds(self) -> float:
        if self._planned_later_seconds is None:
            planned = (stage.plan.latency_seconds + stage.planned_later_seconds() for stage in self._downstream)
            self._planned_later_seconds = max(planned, default=0.0)
        return self._planned_later_seconds

    def shadow_price(self) -> float:
        """Return the expected correct rows that a second of a replica is worth to later arrivals."""
        step = round(log(self.service_ratio or 1.0) / SHADOW_PRICE_STEP)
        price = self._shadow_prices.get(step)
        if price is None:
            price = self._shadow_prices[step] = observed_shadow_price(self.plan, exp(step * SHADOW_PRICE_STEP))
        return price

    @property
    def service_ratio(self) -> float | None:
        """Observed over profiled seconds of the variant's recent batches; None before the first."""
        return self.service_times.recent_ratio(self.variant)

    def other_service_ratios(self) -> dict[str, float]:
        """Return observed over profiled seconds of the other variants that served rows."""
        ratios = {other: self.service_times.recent_ratio(other) for other in self.other_variants - {self.variant}}
        return {other: ratio for other, ratio in ratios.items() if ratio is not None}

    def on_dispatch(self, rows: int) -> None:
        """Learn the size of batches; `rows` includes concurrent prefills."""
        before = round(self._typical_rows)
        self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)
        if round(self._typical_rows) != before:
            self.forget_predictions()

    def observe(self, batch: Batch, answer: Completed, now: float) -> tuple[float, float]:
        """Return the seconds of a batch since its replica was free, and their ratio to the profile, and learn them."""
        replica, key = batch.replica, batch.key
        seconds = now - max(batch.dispatched_at, replica.completed_at)
        others = 0.0
        if answer.replica_queue_seconds is not None:
            others = wait_for_others(
                answer.replica_queue_seconds, batch.dispatched_at, replica.completed_at, replica.transfer_seconds
            )
        self.service_times.wait.observe(others)
        self._queueing.observe(batch.dispatched_at - batch.row_slices[0].request.enqueued_at)
        own = max(seconds - others, 0.0)
        usual = self._normalize_to_usual_prompt(batch, own) if self.plan.prefill_seconds else own
        self.service_times.observe(key, batch.rows, usual, concurrent=batch.concurrent_prefills, now=now)
        self.forget_predictions()
        if answer.compute_seconds is not None and batch.found_idle:
            replica.observe_transfer(max(seconds - others - answer.compute_seconds, 0.0))
        return seconds, self.service_times.recent_ratio(key[0]) or 1.0

    def relax(self, variant: str) -> None:
        self.service_times.relax([point.key for point in self.points(variant)])
        self.forget_predictions()
        for stage in self._downstream:
            stage.relax(stage.variant)
