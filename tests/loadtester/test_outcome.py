"""One outcome for every end of a request."""

import pytest

from trimtab_loadtester.outcome import classify
from trimtab_pipelines.ends import End


@pytest.mark.parametrize(
    ("code", "latency_seconds", "outcome"),
    [
        ("200", 0.5, End.OK),
        ("OK", 0.51, End.LATE),
        ("504", 0.1, End.DROPPED),
        ("DEADLINE_EXCEEDED", 9.0, End.DROPPED),
        ("429", 0.1, End.REFUSED),
        ("503", 0.1, End.REFUSED),
        ("RESOURCE_EXHAUSTED", 0.1, End.REFUSED),
        ("UNAVAILABLE", 0.1, End.REFUSED),
        ("500", 0.1, End.FAILED),
        ("400", 0.1, End.FAILED),
        ("ConnectionLost", 0.1, End.FAILED),
        ("GaveUp", 60.0, End.FAILED),
    ],
)
def test_codes_and_time_decide(code: str, latency_seconds: float, outcome: End) -> None:
    assert classify(code, latency_seconds, slo_seconds=0.5) is outcome
