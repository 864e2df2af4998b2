"""A mix of classes that differs from the evidence is reported, whatever the confidences are."""

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_router.scheduling.output_monitor import MIN_ROWS, OutputMonitor

KEY = ("known", "default")
EVIDENCE = {"source": "Measured", "outputShares": {str(digit): 0.1 for digit in range(10)}}
EVEN, SKEWED = np.full(10, 0.1), np.repeat([5.0, 1.0], 5) / 30.0


def a_monitor():
    variants = [a_variant("known", accuracyEvidence=EVIDENCE), a_variant("unknown")]
    return OutputMonitor(a_pipeline([a_stage(variants=variants)]).spec.stages[0])


def serve(monitor, rng, rows, shares):
    for _ in range(rows // 2):
        monitor.observe(KEY, rng.choice(10, 2, p=shares), 1.0)
        yield monitor.changed()


@pytest.mark.parametrize("seed", range(5))
def test_skewed_classes_are_reported_until_they_end(seed):
    rng, monitor = np.random.default_rng(seed), a_monitor()

    assert not any(serve(monitor, rng, 20_000, EVEN))
    *_, changed = serve(monitor, rng, 3000, SKEWED)
    assert changed == {KEY: pytest.approx(0.26, abs=0.06)}
    *_, changed = serve(monitor, rng, 10_000, EVEN)
    assert changed == {}


def test_few_rows_and_points_without_evidence_report_nothing():
    monitor = a_monitor()
    monitor.observe(KEY, np.zeros(int(MIN_ROWS) - 1, np.int64), 1.0)
    monitor.observe(("unknown", "default"), np.zeros(5000, np.int64), 1.0)

    assert monitor.changed() == {}
    monitor.observe(KEY, np.zeros((2, 1), np.int64), 1.0)
    assert monitor.changed() == {KEY: 0.9}
