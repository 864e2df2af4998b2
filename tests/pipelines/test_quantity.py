"""Kubernetes quantities and durations: lossless parsing and rendering."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_pipelines.quantity import (
    format_bytes,
    format_cores,
    format_duration,
    parse_duration,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("500m", 0.5),
        ("2", 2.0),
        (2, 2.0),
        ("0.1", 0.1),
        ("1Ki", 1024.0),
        ("1.5Gi", 1.5 * 2**30),
        ("3k", 3000.0),
        (".5", 0.5),
    ],
)
def test_quantity_is_parsed(written, number):
    assert parse_quantity(written) == number


@pytest.mark.parametrize(
    "written", ["", "m", "-1", "1 core", "0x10", "1e3", "nan", "inf", None, True, [], float("nan"), -2]
)
def test_invalid_quantity_is_rejected_with_an_example(written):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(written)


@pytest.mark.parametrize(
    ("written", "seconds"), [("250ms", 0.25), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), (3, 3.0)]
)
def test_duration_is_parsed_to_seconds(written, seconds):
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("written", ["", "10", "5 s", "-1s", "1d", None, False, float("inf")])
def test_invalid_duration_is_rejected_with_an_example(written):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(written)


@given(st.integers(0, 10**6))
def test_cores_round_trip(millicores):
    assert parse_quantity(format_cores(millicores / 1000)) == pytest.approx(millicores / 1000)


@given(st.integers(0, 2**50))
def test_bytes_round_trip(size):
    assert parse_quantity(format_bytes(size)) == size


@given(st.integers(0, 10**7))
def test_durations_round_trip(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)
