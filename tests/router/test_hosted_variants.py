"""Several variants in one replica: points by readiness, batches of both variants, and escalation between them."""

import numpy as np
import pytest

from tests.builders import a_variant
from tests.router.test_looking_again import DOUBTED, OUTPUTS, SURE
from tests.router.test_stage_scheduler import SchedulerScenario
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.observability.metrics import Metrics
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.replica_slots import Completed

LOOK = {"to": "default", "variant": "large", "confidenceBelow": 0.5, "share": 0.5, "accuracy": 0.95}
LARGE = {"name": "default", "variant": "large", "accuracy": 0.9, "serviceSeconds": {1: 1.0, 8: 4.0}}
SMALL, BOTH = frozenset({"small"}), frozenset({"small", "large"})


class Hosting(SchedulerScenario):
    """A stage that plans a small variant, which takes a tenth of the seconds, and may run a large one."""

    def __init__(self, policy="TokenAdaptive", ready=(BOTH,), looks=(LOOK,), **planned):
        variants = [a_variant("small", accuracy=0.8), a_variant("large", accuracy=0.9)]
        stage = {"outputs": OUTPUTS, "confidence": "sure", "variants": variants}
        plan = {"accuracy": 0.8, "serviceSeconds": {1: 0.1, 8: 0.4}, "escalations": list(looks), "upgrades": [LARGE]}
        super().__init__(policy, slots=len(ready), stage=stage, **plan | planned)
        for slot, variants_ready in zip(self.slots, ready, strict=True):
            slot.set_ready_variants(variants_ready)
        self.scheduler.refresh_replicas()

    def ask(self, rows=1, seconds=100.0, floor=0.0):
        work = self.take(rows, self.clock.now + seconds, options=RequestOptions(accuracy_floor=floor))
        work.accuracy_floor = floor
        self.settle()
        return work

    def answer(self, batch, confidences):
        y = np.full((batch.rows, 4), 1.0 if batch.variant == "large" else 0.0, np.float32)
        sure = np.array(confidences, np.float32)
        self.scheduler.on_batch_end(batch, Completed([{"y": y, "sure": sure}], batch.point.name))
        self.settle()

    @property
    def keys(self):
        return [batch.key for batch in self.sent]


def test_points_are_those_of_the_ready_variants():
    top = Hosting(ready=(SMALL, BOTH))
    by_replica = [top.scheduler.view("small", 0.0, slot).points for slot in top.slots]
    whole = top.scheduler.view("small", 0.0).points

    assert [[point.key for point in points] for points in by_replica] == [
        [("small", "default")],
        [("large", "default"), ("small", "default")],
    ]
    assert whole is by_replica[1], "any replica offers both"


def test_batch_runs_the_most_accurate_variant_in_time():
    top = Hosting("SlackFit", looks=())
    top.ask(seconds=50.0)
    top.clock.run(1.0)
    top.answer(top.sent[0], [SURE])
    top.ask(seconds=0.6)

    assert top.keys == [("large", "default"), ("small", "default")]


def test_escalated_rows_run_on_the_other_variant():
    top = Hosting("ModalityMix")
    work = top.ask(rows=2, seconds=1.9)
    assert top.keys == [("small", "default")]
    top.clock.run(0.14)
    top.answer(top.sent[0], [SURE, DOUBTED])

    assert top.keys == [("small", "default"), ("large", "default")]
    assert [(row_slice.start, row_slice.stop) for row_slice in top.sent[1].row_slices] == [(1, 2)]
    top.clock.run(1.2)
    top.answer(top.sent[1], [SURE])
    assert work.owner.outputs["y"][:, 0].tolist() == [0.0, 1.0]
    assert [part.variant for part in work.owner.served] == ["small", "large"]


def test_late_second_pass_keeps_the_first_response():
    top = Hosting("ModalityMix")
    work = top.ask(rows=2, seconds=1.9)
    top.clock.run(1.0)
    top.answer(top.sent[0], [SURE, DOUBTED])
    top.clock.run(2.0)

    assert len(top.sent) == 1
    assert work.owner.outputs["y"][:, 0].tolist() == [0.0, 0.0]
    assert [part.escalation_pending for part in work.owner.served] == [False, True]


def test_second_pass_leaves_time_to_later_stages():
    top, later = Hosting("ModalityMix"), Hosting().scheduler
    later.latency_model.apply_plan(later.plan.replace(latency_seconds=1.2))
    top.scheduler.set_downstream([later])
    work = top.ask(rows=2, seconds=1.9)
    top.clock.run(0.14)
    top.answer(top.sent[0], [SURE, DOUBTED])
    top.clock.run(0.7)

    assert len(top.sent) == 1
    assert work.owner.outputs["y"][:, 0].tolist() == [0.0, 0.0]


def test_later_stages_leave_the_first_its_planned_time():
    """The plan of both stages fills the SLO of 2 s."""
    large = LARGE | {"serviceSeconds": {1: 1.0, 8: 1.2}}
    top, later = Hosting(looks=(), latencySeconds=1.0, upgrades=[large]), Hosting().scheduler
    later.latency_model.apply_plan(later.plan.replace(latency_seconds=1.0))
    top.scheduler.set_downstream([later])
    top.ask(seconds=2.0)

    assert top.keys == [("large", "default")]


def test_rows_leave_later_stages_the_queueing_seen_there():
    """At most the second that they plan, and at least half of it."""
    top, later = Hosting(looks=()), Hosting(looks=())
    later.scheduler.latency_model.apply_plan(later.scheduler.plan.replace(latency_seconds=1.0))
    top.scheduler.set_downstream([later.scheduler])
    model = top.scheduler.latency_model
    idle = model.reserved_seconds(0.1)
    later.ask()
    later.ask()
    later.clock.run(9.0)
    later.answer(later.sent[0], [SURE])
    later.answer(later.sent[1], [SURE])

    assert model.reserved_seconds(0.1) == pytest.approx(idle + 0.5)


@pytest.mark.parametrize("policy", ["EarliestDeadlineFirst", "TokenAdaptive", "SlackFit"])
def test_row_waits_for_a_replica_with_its_variant(policy):
    top = Hosting(policy, ready=(BOTH, SMALL), looks=())
    first, second = top.ask(floor=0.85), top.ask(floor=0.85)

    assert [(batch.replica.name, batch.key) for batch in top.sent] == [("slot-0", ("large", "default"))]
    assert (first.owner.refusal, second.owner.refusal) == (None, None)
    top.clock.run(1.0)
    top.answer(top.sent[0], [SURE])
    assert [(batch.replica.name, batch.key) for batch in top.sent[1:]] == [("slot-0", ("large", "default"))]


def test_service_ratio_of_another_variant_is_reported():
    top = Hosting("SlackFit", looks=())
    top.ask()
    top.clock.run(2.0)
    top.answer(top.sent[0], [SURE])

    ratios = top.scheduler.latency_model.other_service_ratios()
    assert ratios.keys() == {"large"}
    assert ratios["large"] > 1.0


def test_served_again_rows_are_counted_at_both_points():
    counted = []

    class Counting(Hosting):
        def count_low_confidence(self, *values):
            counted.append(values)

        count_escalated_rows = count_low_confidence

    top = Counting("ModalityMix")
    top.ask(rows=2, seconds=1.9)
    top.clock.run(0.14)
    top.answer(top.sent[0], [SURE, DOUBTED])
    top.clock.run(1.2)
    top.answer(top.sent[1], [SURE])

    small, large = ("small", "default"), ("large", "default")
    assert counted == [(small, 0.5, 2, 1), (small, large, 1)]


def test_router_reports_the_rows_of_the_last_minute():
    metrics, light, heavy = Metrics("a", "p", ServiceLevel(latency_seconds=1.0)), ("light", "p"), ("heavy", "p")
    stats, counts = metrics.stage("read"), metrics.row_counts["read"]
    stats.observe_batch(light, 100, 0.1, 1.0)
    before = counts.recent_rows(0.0)
    counts.recent_low_confidence(0.0)
    for now in (30.0, 90.0):
        stats.observe_batch(light, 50, 0.1, 1.0)
        stats.observe_batch(heavy, 10, 0.1, 1.0)
        stats.count_low_confidence(light, 0.5, 50, 10)
        stats.count_escalated_rows(light, heavy, 10)
        low, rows = counts.recent_low_confidence(now), counts.recent_rows(now)

    assert [(each.variant, each.rows) for each in before] == [("light", 100.0)]
    assert {(each.variant, each.escalated): each.rows for each in rows} == {("light", False): 40, ("heavy", True): 10}
    assert [(each.confidence_below, each.rows, each.low_rows) for each in low] == [(0.5, 50, 10)]
