"""Evidence of earlier stages says how much the confidence of later ones changes with their variants."""

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_router.execution.confidence_shifts import ConfidenceShifts
from trimtab_router.scheduling.stage_request import ServedRows


def served_by(variant, rows):
    return ServedRows(variant, "default", rows, 0.0, 0.1, rows, 0.9, 1.0)


def test_shift_is_the_mean_over_the_rows_of_an_earlier_stage():
    evidence = {"source": "Measured", "confidenceShifts": {"read": -0.08}}
    variants = [a_variant("light", accuracyEvidence=evidence), a_variant("best")]
    shifts = ConfidenceShifts(a_pipeline([a_stage("locate", variants=variants)]).spec.stages)

    assert shifts.of("read", {"locate": [served_by("light", 3), served_by("best", 1)]}) == pytest.approx(-0.06)
    assert shifts.of("track", {"locate": [served_by("light", 3)]}) == shifts.of("read", {}) == 0.0
