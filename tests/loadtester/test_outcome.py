"""One outcome for every end of a request."""

import pytest

from trimtab_loadtester.outcome import RequestOutcome, classify


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
def test_codes_and_time_decide(code: str, latency_seconds: float, outcome: RequestOutcome) -> None:
    assert classify(code, latency_seconds, slo_seconds=0.5) is outcome
