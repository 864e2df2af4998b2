"""Outcome of a request by its code and latency."""

import pytest

from trimtab_loadtester.outcome import ClientTimings, classify
from trimtab_pipelines.request_outcome import RequestOutcome


@pytest.mark.parametrize(
    ("code", "latency_seconds", "outcome"),
    [
        ("200", 0.5, RequestOutcome.OK),
        ("OK", 0.51, RequestOutcome.LATE),
        ("504", 0.1, RequestOutcome.DROPPED),
        ("DEADLINE_EXCEEDED", 9.0, RequestOutcome.DROPPED),
        ("429", 0.1, RequestOutcome.REFUSED),
        ("503", 0.1, RequestOutcome.REFUSED),
        ("RESOURCE_EXHAUSTED", 0.1, RequestOutcome.REFUSED),
        ("UNAVAILABLE", 0.1, RequestOutcome.REFUSED),
        ("500", 0.1, RequestOutcome.FAILED),
        ("400", 0.1, RequestOutcome.FAILED),
        ("ConnectionLost", 0.1, RequestOutcome.FAILED),
        ("GaveUp", 60.0, RequestOutcome.FAILED),
    ],
)
def test_outcome_follows_from_code_and_latency(code: str, latency_seconds: float, outcome: RequestOutcome) -> None:
    assert classify(code, ClientTimings(latency_seconds), ClientTimings(0.5)) is outcome


@pytest.mark.parametrize(
    ("first_seconds", "between_seconds", "outcome"),
    [
        (0.2, 0.02, RequestOutcome.OK),
        (0.21, 0.02, RequestOutcome.LATE),
        (0.2, 0.03, RequestOutcome.LATE),
        (0.2, float("nan"), RequestOutcome.OK),
    ],
)
def test_streamed_answer_is_late_by_any_token_slo(
    first_seconds: float, between_seconds: float, outcome: RequestOutcome
) -> None:
    took = ClientTimings(0.4, first_seconds, between_seconds)

    assert classify("200", took, ClientTimings(0.5, 0.2, 0.02)) is outcome
    assert classify("200", took, ClientTimings(0.5, float("inf"), float("inf"))) is RequestOutcome.OK
