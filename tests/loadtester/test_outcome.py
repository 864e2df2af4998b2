"""One outcome for every end of a request."""

import pytest

from trimtab_loadtester.outcome import Times, classify
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
    assert classify(code, Times(latency_seconds), Times(0.5)) is outcome


@pytest.mark.parametrize(
    ("first_seconds", "between_seconds", "outcome"),
    [(0.2, 0.02, End.OK), (0.21, 0.02, End.LATE), (0.2, 0.03, End.LATE), (0.2, float("nan"), End.OK)],
)
def test_a_streamed_answer_is_late_where_it_began_late_or_went_on_slowly(
    first_seconds: float, between_seconds: float, outcome: End
) -> None:
    took = Times(0.4, first_seconds, between_seconds)

    assert classify("200", took, Times(0.5, 0.2, 0.02)) is outcome
    assert classify("200", took, Times(0.5, float("inf"), float("inf"))) is End.OK
