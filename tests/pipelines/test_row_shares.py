"""Shares of rows by the point that answers them."""

import pytest

from trimtab_pipelines.row_shares import AnsweredBy, answered_rows, describe_shares, escalation_rate

LIGHT, HEAVY = ("light", "default"), ("heavy", "default")


def test_escalated_row_is_answered_by_its_second_point():
    rows = answered_rows({LIGHT: 100.0, HEAVY: 35.0}, {(LIGHT, HEAVY): 15.0})

    assert rows == {AnsweredBy(*LIGHT): 85, AnsweredBy(*HEAVY): 20, AnsweredBy(*HEAVY, escalated=True): 15}
    assert escalation_rate(rows) == pytest.approx(15 / 120)


@pytest.mark.parametrize(
    ("rows", "phrase"),
    [
        (
            {AnsweredBy("m", "default"): 85, AnsweredBy("xl", "default", escalated=True): 15},
            "85 % m, 15 % escalated to xl",
        ),
        ({AnsweredBy("s", "half"): 0.7, AnsweredBy("m", "default"): 0.3}, "70 % s/half, 30 % m"),
        ({AnsweredBy("m", "default"): 9999, AnsweredBy("s", "default"): 1}, "100 % m"),
        ({}, ""),
    ],
)
def test_shares_are_described_in_percent(rows, phrase):
    assert describe_shares(rows) == phrase
    assert escalation_rate({}) == 0.0
