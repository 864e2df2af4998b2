"""An accuracy that no longer holds is noticed, from what models say and from rows that are answered twice."""

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.test_stage_scheduler import SchedulerScenario
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_router.scheduling.accuracy_monitor import AccuracyBaseline, AccuracyMonitor
from trimtab_router.scheduling.accuracy_observations import FORGET_SECONDS, MIN_DRIFT, MIN_ROWS
from trimtab_router.scheduling.replica_slots import BatchFailed, Completed, NotReady, Rejected, ReplicaLost

NOW = 7.0
KEY, BEST = ("early", "at"), ("early", "avt")
ALL = (*KEY, "")
OUTPUTS = [{"name": "y", "datatype": "INT64"}, {"name": "sure", "datatype": "FP32"}]


def measured(accuracy, confidence=None, source="Measured", samples=1000):
    """An accuracy, and how certain the model was of the samples behind it; as certain as it was right by default."""
    sure = accuracy if confidence is None else confidence
    return {"accuracy": accuracy, "accuracyEvidence": {"source": source, "samples": samples, "meanConfidence": sure}}


POINTS = [{"name": "default", **measured(0.9)}, {"name": "quick", **measured(0.7)}]
SENSES = [{"name": "at", **measured(0.86)}, {"name": "avt", **measured(0.95)}]


def a_watch(points=SENSES):
    variants = [a_variant("early", operatingPoints=points)]
    stage = a_stage("only", outputs=OUTPUTS, confidence="sure", variants=variants)
    return AccuracyMonitor(a_pipeline([stage]).spec.stages[0])


def serve(watch, rng, rows, accuracy, best_accuracy, boast=0.0):
    """Rows one by one, one in a hundred answered twice; how certain a model is says its accuracy, and `boast` more."""
    for row in range(rows):
        chance = float(np.clip(rng.beta(8 * accuracy, 8 * (1 - accuracy)), 0, 1))
        confidence = min(chance + boast, 1.0)
        watch.observe(KEY, "", np.array([confidence]), NOW)
        if row % 100 == 99:
            best_chance = float(np.clip(rng.beta(8 * best_accuracy, 8 * (1 - best_accuracy)), 0, 1))
            right, best_right = rng.random() < chance, rng.random() < best_chance
            agrees = bool(right and best_right) or bool(not right and not best_right and rng.random() < 0.1)
            watch.observe(BEST, "", np.array([best_chance]), NOW)
            watch.observe_shadow(KEY, BEST, "", confidence, best_chance, agrees=agrees)


@pytest.mark.parametrize("seed", range(5))
def test_broken_input_is_noticed_within_a_minute(seed):
    rng, watch = np.random.default_rng(seed), a_watch()
    serve(watch, rng, 3000, 0.86, 0.95)
    assert watch.drifted_accuracies(NOW) == {}

    serve(watch, rng, 60 * 20, 0.45, 0.95)
    assert watch.drifted_accuracies(NOW)[ALL] == pytest.approx(0.45, abs=0.04)


@pytest.mark.parametrize("seed", range(5))
def test_small_drift_is_reported_after_some_thousand_rows(seed):
    rng, watch = np.random.default_rng(seed), a_watch([{"name": "at", **measured(0.86, samples=20_000)}])

    def answer(rows, accuracy):
        for _ in range(rows // 20):
            watch.observe(KEY, "", rng.beta(8 * accuracy, 8 * (1 - accuracy), 20), NOW)
            yield watch.drifted_accuracies(NOW)

    assert not any(answer(20_000, 0.86))
    *_, drifted = answer(10_000, 0.848)
    assert drifted[ALL] == pytest.approx(0.848, abs=0.005)


@pytest.mark.parametrize(("served", "drifted"), [(0.8, {}), (0.86, {ALL: pytest.approx(0.92, abs=0.01)})])
def test_expected_shift_of_confidence_is_no_drift(served, drifted):
    watch = a_watch()
    for _ in range(2000):
        watch.observe(KEY, "", np.full(5, served), NOW, shift=-0.06)

    assert watch.drifted_accuracies(NOW) == drifted


def test_short_large_drift_is_forgotten_after_its_end():
    rng, watch = np.random.default_rng(0), a_watch()
    serve(watch, rng, 1000, 0.4, 0.95)
    assert ALL in watch.drifted_accuracies(NOW)
    serve(watch, rng, 1200, 0.86, 0.95)
    watch.drifted_accuracies(NOW)
    serve(watch, rng, 1200, 0.86, 0.95)
    assert watch.drifted_accuracies(NOW) == {}


def test_rows_with_task_count_for_points_without_tasks():
    watch = a_watch()
    assert watch.has_baseline(KEY, "cats")
    watch.observe(KEY, "cats", np.full(500, 0.4), NOW)

    assert list(watch.drifted_accuracies(NOW)) == [ALL]


def test_no_drift_is_reported_if_all_is_as_profiled():
    rng, watch = np.random.default_rng(0), a_watch()
    reports = 0
    for _ in range(200):
        serve(watch, rng, 100, 0.86, 0.95)
        reports += bool(watch.drifted_accuracies(NOW))
    assert reports <= 2


def test_shadow_rows_correct_overconfidence():
    honest, boasting = a_watch(), a_watch()
    rng = np.random.default_rng(1)
    serve(boasting, rng, 20_000, 0.6, 0.97, boast=0.26)
    serve(honest, rng, 20_000, 0.6, 0.97)

    assert honest.drifted_accuracies(NOW)[ALL] == pytest.approx(0.6, abs=0.04)
    assert boasting.drifted_accuracies(NOW)[ALL] < 0.86 - 2 * MIN_DRIFT, (
        "a third of what it boasts is taken off, once 200 were compared"
    )


def test_invalid_confidence_is_ignored():
    watch = a_watch()
    watch.observe(KEY, "", np.array([np.nan, 7.5, -2.0] * 100), NOW)

    assert watch.drifted_accuracies(NOW) == {}


def escalate_rows(watch, rng, rows, lost):
    """Rows that a first point was not certain of: a look was measured to win 0.2 a row, and wins `lost` less."""
    for _ in range(rows):
        before = float(np.clip(rng.normal(0.5, 0.1), 0, 1))
        after = float(np.clip(before + rng.normal(0.2 - lost, 0.15), 0, 1))
        watch.observe_escalated(BEST, "", np.array([after]), AccuracyBaseline(KEY, np.array([before]), 0.2), NOW)


@pytest.mark.parametrize("seed", range(5))
def test_escalation_only_point_is_judged_by_its_gain(seed):
    rng, watch = np.random.default_rng(seed), a_watch()
    escalate_rows(watch, rng, 2000, lost=0.04)
    assert watch.drifted_accuracies(NOW) == {}, "rows that are picked out are not judged as exactly as all rows"

    escalate_rows(watch, rng, 60 * 6, lost=0.25)
    assert watch.drifted_accuracies(NOW)[*BEST, ""] == pytest.approx(0.70, abs=0.06)


def test_new_kind_of_rows_replaces_old_observations():
    rng, watch = np.random.default_rng(0), a_watch()
    escalate_rows(watch, rng, 500, lost=0.3)
    assert (*BEST, "") in watch.drifted_accuracies(NOW)

    for _ in range(600):
        watch.observe(BEST, "", np.array([rng.beta(8 * 0.95, 8 * 0.05)]), NOW)
    assert watch.drifted_accuracies(NOW) == {}


def test_unobserved_point_is_trusted_again_after_a_while():
    watch = a_watch()
    watch.observe(KEY, "", np.full(500, 0.4), NOW)

    assert ALL in watch.drifted_accuracies(NOW + FORGET_SECONDS - 1.0)
    assert watch.drifted_accuracies(NOW + FORGET_SECONDS) == {}
    watch.observe(KEY, "", np.full(MIN_ROWS - 1, 0.4), NOW + FORGET_SECONDS)
    assert watch.drifted_accuracies(NOW + FORGET_SECONDS) == {}, "it begins from nothing"


@pytest.mark.parametrize(
    ("evidence", "reported"),
    [
        (measured(0.8, 0.95), True),
        (measured(0.8, 0.95, "Published"), False),
        (measured(0.8, 0.95, "Declared"), False),
        ({"accuracy": 0.8, "accuracyEvidence": {"source": "Measured", "samples": 1000}}, False),
    ],
)
def test_only_change_of_profiled_confidence_counts(evidence, reported):
    watch = a_watch([{"name": "at", **evidence}])
    watch.observe(KEY, "", np.full(320, 0.95), NOW)
    assert watch.drifted_accuracies(NOW) == {}, "as certain as ever, and never right so often"

    watch.observe(KEY, "", np.full(1000, 0.5), NOW)
    assert watch.drifted_accuracies(NOW) == ({ALL: pytest.approx(0.8 - 0.45, abs=0.02)} if reported else {})


@pytest.mark.parametrize("agreed_of_ten", [7, 2])
def test_shadow_rows_are_read_relative_to_profiled_confidence(agreed_of_ten):
    watch = a_watch([{"name": "at", **measured(0.7, 0.95)}, {"name": "avt", **measured(0.95, 0.99)}])
    for row in range(400):
        watch.observe(KEY, "", np.array([0.95]), NOW)
        watch.observe_shadow(KEY, BEST, "", 0.95, 0.99, agrees=row % 10 < agreed_of_ten)

    right = {7: {}, 2: {ALL: pytest.approx(0.45, abs=0.03)}}
    assert watch.drifted_accuracies(NOW) == right[agreed_of_ten], "two thirds of what 400 comparisons tell"
    assert watch.shadow_rows == {KEY: 400}


def test_uncalibrated_escalations_report_nothing():
    rng, watch = np.random.default_rng(0), a_watch([SENSES[0], {"name": "avt", **measured(0.95, 0.99)}])
    escalate_rows(watch, rng, 500, lost=0.3)

    assert watch.drifted_accuracies(NOW) == {}


def on_tasks(accuracy, **by_task):
    own = {task: {"value": one, "source": "Measured", "meanConfidence": one} for task, one in by_task.items()}
    return measured(accuracy) | {"accuracyByTask": own}


def test_rows_of_a_task_compare_with_its_profile():
    watch = a_watch([{"name": "at", **on_tasks(0.5, crops=0.78, faces=0.92, turned=0.25)}])
    watch.observe(KEY, "crops", np.full(500, 0.78), NOW)
    assert watch.drifted_accuracies(NOW) == {}, "crops alone, as certain of them as ever"

    watch.observe(KEY, "another", np.full(500, 0.1), NOW)
    assert watch.drifted_accuracies(NOW) == {}, "nothing was measured of it"

    watch.observe(KEY, "turned", np.full(1000, 0.05), NOW)
    accuracies = watch.drifted_accuracies(NOW)
    assert accuracies == {
        ALL: pytest.approx(0.3, abs=0.02),
        (*KEY, "turned"): pytest.approx(0.05, abs=0.02),
        (*KEY, "crops"): 0.78,
    }, "what all rows are by now, the one that drifted, and the one that was seen to hold; faces were not seen"


def joined(accuracy, confidence):
    return {"at": Accuracy(value=accuracy, source="Measured", samples=100, mean_confidence=confidence)}


def test_registered_task_is_monitored_until_unregistered():
    watch = a_watch()
    watch.register_task("early", "late", joined(0.7, 0.95))
    watch.observe(KEY, "late", np.full(500, 0.95), NOW)
    assert watch.drifted_accuracies(NOW) == {}, "as certain of them as ever, though more than of others"

    watch.register_task("early", "late", joined(0.7, 0.95))  # as replicas tell again and again
    watch.observe(KEY, "late", np.full(1000, 0.55), NOW)
    assert watch.drifted_accuracies(NOW) == {
        ALL: pytest.approx(0.86 - 0.4, abs=0.03),
        (*KEY, "late"): pytest.approx(0.7 - 0.4, abs=0.03),
    }

    watch.unregister_task("early", "late")
    assert set(watch.drifted_accuracies(NOW)) == {ALL}
    watch.register_task("early", "late", joined(0.6, 0.55))
    watch.observe(KEY, "late", np.full(500, 0.55), NOW)
    assert watch.drifted_accuracies(NOW)[*KEY, "late"] == 0.6, "another of that name, which holds"


def test_registered_task_without_confidence_affects_no_other():
    watch = a_watch()
    watch.register_task("early", "late", joined(0.4, None))
    assert not watch.has_baseline(KEY, "late")
    watch.observe(KEY, "late", np.full(1000, 0.3), NOW)

    assert watch.drifted_accuracies(NOW) == {}


class Audited(SchedulerScenario):
    """A stage of one replica, whose batches leave at the cheap point: its deadlines allow no other."""

    def __init__(self):
        self.waits = []
        quick = {"name": "quick", "accuracy": 0.7, "serviceSeconds": {1: 0.1, 8: 0.4}}
        stage = {"outputs": OUTPUTS, "confidence": "sure", "variants": [a_variant(operatingPoints=POINTS)]}
        super().__init__("SlackFit", stage=stage, fallbacks=[quick])

    def observe_queue_seconds(self, seconds):
        self.waits.append(seconds)

    def answer(self, label):
        batch = self.sent[-1]
        given = [
            {"y": np.full(row_slice.rows, label), "sure": np.full(row_slice.rows, 0.7, np.float32)}
            for row_slice in batch.row_slices
        ]
        self.clock.run(self.clock.now + batch.point.seconds(batch.rows))
        self.scheduler.on_batch_end(batch, Completed(given, batch.point.name))
        self.settle()

    def serve(self, batches, label=3):
        for _ in range(batches):
            self.take(8, self.clock.now + 0.9)
            self.settle()
            assert self.sent[-1].point.name == "quick"
            self.answer(label)


def test_one_row_in_a_hundred_is_evaluated_when_idle():
    top = Audited()
    top.serve(12)
    assert len(top.sent) == 12

    top.take(8, top.clock.now + 0.9).task = "cats"
    top.settle()
    top.answer(label=3)
    audit = top.sent[-1]
    assert (audit.point.name, audit.rows, audit.row_slices[0].request.task) == ("default", 1, "cats")
    top.answer(label=3)
    assert top.scheduler.accuracy_monitor.shadow_rows == {("small", "quick"): 1}


def test_shadow_rows_delay_no_other_row_and_report_no_wait():
    top = Audited()
    top.serve(12)
    top.take(8, top.clock.now + 0.9)
    top.settle()
    for _ in range(3):  # the row that is compared lies behind these
        waits = top.take(8, top.clock.now + 5.0)
        top.answer(label=3)
        assert top.sent[-1].row_slices[0].request is waits
    top.answer(label=3)
    waited = list(top.waits)
    assert top.sent[-1].point.name == "default"
    assert top.clock.now - top.sent[-1].row_slices[0].request.enqueued_at > 1.0

    top.answer(label=3)
    assert top.scheduler.accuracy_monitor.shadow_rows == {("small", "quick"): 1}
    assert top.waits == waited


@pytest.mark.parametrize(
    "ending",
    [
        ReplicaLost("gone", delivered=True),
        ReplicaLost("gone", delivered=False),
        NotReady(),
        Rejected("no"),
        BatchFailed("odd"),
        BatchFailed("odd", retryable=False),
    ],
    ids=repr,
)
def test_shadow_row_is_tried_once_and_takes_no_client_place(ending):
    top = Audited()
    top.serve(13)
    audit, sent = top.sent[-1], len(top.sent)
    assert audit.point.name == "default"
    top.stats_calls.clear()
    top.scheduler.on_batch_end(audit, ending)

    assert top.scheduler.queue.rows == 0
    top.clock.run(top.clock.now + 20.0)
    assert len(top.sent) == sent
    assert len(top.stats_calls) == isinstance(ending, ReplicaLost | BatchFailed)  # of the replica, and of no request
