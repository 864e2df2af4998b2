"""Recorded loads: gaps stay gaps, and errors name the line of the file."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from trimtab_predictor.trace import Trace, TraceError, read_trace


def a_file(folder: Path, text: str, name: str = "load.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["load.csv", "load.csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_counts_are_read_and_zeros_are_missing(tmp_path: Path, name: str, mark: str) -> None:
    trace = read_trace(a_file(tmp_path, f"{mark}rps\n5\n0\r\n 12 \n", name))

    np.testing.assert_array_equal(trace.rps, [5.0, np.nan, 12.0])
    assert (len(trace), np.isnan(trace.rps).sum(), trace.name) == (3, 1, name)


def test_zeros_can_mean_no_load(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_trace(a_file(tmp_path, "rps\n0\n3\n"), zeros_are_gaps=False).rps, [0.0, 3.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("rps\n", "holds 0 seconds"),
        ("5\n6\n", r"line 1: '5' is a number where the header belongs"),
        ("5.5\n6\n", r"line 1: '5\.5' is a number where the header belongs"),
        ("\ufeff5\n6\n", r"line 1: '5' is a number where the header belongs"),
        ("rps\n5\nmany\n", r"line 3 holds 'many'; expected a whole number of at least 0"),
        ("rps\n5.5\n", r"line 2 holds '5\.5'"),
        ("rps\n5\n\n6\n", r"line 3 is empty"),
        ("rps\n1_000\n", r"line 2 holds '1_000'"),
        ("rps\n٣\n", r"line 2 holds '٣'"),
        ("rps\n" + "9" * 5000 + "\n", r"line 2: 9{20} requests in a second; at most 1000000000"),
        ("rps\n0\n0\n", "all 2 seconds are 0, which means missing"),
    ],
)
def test_invalid_trace_is_reported_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = a_file(tmp_path, text)

    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text", "not a whole gzip file"),
        (gzip.compress(b"rps\n" + b"5\n" * 5000, mtime=0)[:-12], "not a whole gzip file"),
        (gzip.compress(b"rps\n\xff\n", mtime=0), r"not text \(byte 4\)"),
    ],
)
def test_damaged_file_is_reported_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "load.csv.gz"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_missing_file_and_folder_are_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: no such trace file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_excerpts_can_be_cut_and_divided() -> None:
    trace = Trace(np.array([8.0, 17.0, np.nan, 40.0]), "t")

    np.testing.assert_array_equal(trace.excerpt(0, 2).divided(8, whole=True).rps, [1.0, 2.0])
    np.testing.assert_array_equal(trace.divided(2).rps, [4.0, 8.5, np.nan, 20.0])


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 1), (0, 5)])
def test_excerpt_outside_the_trace_is_rejected(start: int, end: int) -> None:
    with pytest.raises(TraceError, match=rf"t: cannot cut seconds {start} to {end} out of 4"):
        Trace(np.ones(4), "t").excerpt(start, end)


def test_excerpt_of_gaps_is_rejected() -> None:
    with pytest.raises(TraceError, match="all seconds from 1 to 2 are missing"):
        Trace(np.array([1.0, np.nan]), "t").excerpt(1, 2)


@pytest.mark.parametrize("factor", [0.0, -8.0, float("nan"), float("inf")])
def test_factor_must_be_positive(factor: float) -> None:
    with pytest.raises(TraceError, match=r"t: cannot divide by .*; the factor must be finite and above 0"):
        Trace(np.ones(4), "t").divided(factor)
