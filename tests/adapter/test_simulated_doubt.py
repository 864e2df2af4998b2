"""Confidence of simulated rows: each task escalates its measured share."""

import numpy as np
import pytest

from trimtab_adapter.simulation.transport import _confidences
from trimtab_pipelines.escalation import TaskEscalation
from trimtab_router.scheduling.policies.interface import Escalation, Point

BY_TASK = {
    "cars": TaskEscalation(confidence_below=0.6, share=0.3, accuracy=0.9),
    "birds": TaskEscalation(confidence_below=0, share=0, accuracy=0.4),
}
POINT = Point("fast", 0.7, lambda rows: 0.1 * rows, escalations=(Escalation("full", 0.4, 0.15, 0.8, BY_TASK),))


@pytest.mark.parametrize(("task", "share"), [("cars", 0.3), ("birds", 0.0)])
def test_measured_share_of_rows_has_low_confidence(task: str, share: float) -> None:
    drawn = np.random.default_rng(1).random(10_000)
    doubted = _confidences(POINT, task, drawn) < POINT.escalations[0].rule.for_task(task).confidence_below

    assert doubted.mean() == pytest.approx(share, abs=0.02)
