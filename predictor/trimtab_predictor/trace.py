"""Trace: a recorded load in requests per second, one line a second.

Public traces mark hours without recording by zeros. A forecaster that took them for silence would learn to expect it,
and a load test would send nothing, so a zero is read as a missing second unless the caller says otherwise.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.errors import UserError

MAX_RPS = 10**9
MAX_TRACE_SECONDS = 100_000_000
_FORM = "a trace has a header line, then one whole number of requests a line, one line a second"


class TraceError(UserError, ValueError):
    """A trace that cannot be read or cut; the message names the file and line, and the expected form."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in each second."""

    rps: NDArray[np.float64]
    """[S], float64; NaN for missing seconds."""
    name: str = "trace"
    """For reports."""

    def __len__(self) -> int:
        return int(self.rps.size)

    def excerpt(self, start_seconds: int, end_seconds: int) -> Self:
        """Cut out the seconds from start to before end; raise TraceError if they are outside or contain no load."""
        if not 0 <= start_seconds < end_seconds <= len(self):
            span = f"seconds {start_seconds} to {end_seconds} out of {len(self)}"
            raise TraceError(f"{self.name}: cannot cut {span}; 0 <= start < end <= its length must hold")
        cut = self.rps[start_seconds:end_seconds]
        if np.isnan(cut).all():
            raise TraceError(f"{self.name}: all seconds from {start_seconds} to {end_seconds} are missing")
        return type(self)(cut, f"{self.name}[{start_seconds}:{end_seconds}]")

    def divided(self, factor: float, *, whole: bool = False) -> Self:
        """Divide the load, without fractions if `whole` as IPA does; raise TraceError unless the factor is above 0."""
        if not (np.isfinite(factor) and factor > 0):
            raise TraceError(f"{self.name}: cannot divide by {factor:g}; the factor must be finite and above 0")
        divided = self.rps / factor
        return type(self)(np.floor(divided) if whole else divided, f"{self.name}/{factor:g}")


def read_trace(path: Path, *, zeros_are_gaps: bool = True) -> Trace:
    """Read a .csv or .csv.gz file; raise TraceError if it is missing, damaged, has other lines, or only gaps."""
    lines = _read_lines(path)
    if not lines:
        raise TraceError(f"{path} is empty; {_FORM}")
    if is_number(lines[0]):
        raise TraceError(f"{path}, line 1: {lines[0].strip()!r} is a number where the header belongs; {_FORM}")
    if not 1 < len(lines) <= MAX_TRACE_SECONDS:
        raise TraceError(f"{path} holds {len(lines) - 1} seconds; 1 to {MAX_TRACE_SECONDS} can be read")
    counts = [_count(line, number, path) for number, line in enumerate(lines[1:], start=2)]
    rps = np.array(counts, dtype=np.float64)
    if zeros_are_gaps:
        rps[rps == 0] = np.nan
        if np.isnan(rps).all():
            raise TraceError(f"{path}: all {rps.size} seconds are 0, which means missing; there is no load to read")
    return Trace(rps, path.name)


def _read_lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text (byte {error.start}); {_FORM}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def is_number(line: str) -> bool:
    try:
        float(line)
    except ValueError:
        return False
    return True


def _count(line: str, number: int, path: Path) -> int:
    text = line.strip()
    if not (text.isascii() and text.isdigit()):
        problem = "is empty" if not text else f"holds {text[:40]!r}"
        raise TraceError(f"{path}, line {number} {problem}; expected a whole number of at least 0 (0 if missing)")
    # The length is checked first: int() takes unbounded time for a long row of digits.
    if len(text) > 20 or int(text) > MAX_RPS:
        raise TraceError(f"{path}, line {number}: {text[:20]} requests in a second; at most {MAX_RPS} are allowed")
    return int(text)
