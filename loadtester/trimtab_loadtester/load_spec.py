"""`LoadSpec`: requests per second over time, from a command line, a recorded trace or a seed.

A load is a pattern of rates, one a second, that repeats or holds its last rate after its end. A generated load has
plateaus with steps and short bursts, as the Twitter trace has: a round has the minimum rate, the maximum rate and two
rates between, in random order, so that a few minutes cover the whole range.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.multimodal.rates import synthetic_rates
from trimtab_loadtester.multimodal.traffic import Traffic
from trimtab_pipelines.errors import UserError
from trimtab_predictor.trace import Trace, is_number, read_trace

GENERATED_SECONDS = 3600
MIN_RPS, MAX_RPS = 1e-3, 1e6
LEVELS_PER_ROUND = 4
BURST_PROBABILITY = 0.5
BURST_FACTOR = 2.0
BURST_SECONDS = (3, 7)
MAX_PATTERN_SECONDS = 10_000_000
_FORMS = (
    "20 or constant:20 (requests a second), step:5,40@60 (5 rps, then 40 from second 60), "
    "steps:5x30,20x30 (rps x seconds) "
    "or generated:low=4,high=40,seed=1, or of chats multimodal:rps=5,seed=1"
)


class LoadError(UserError, ValueError):
    """An invalid load; the message describes a valid one."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadSpec:
    """Requests per second over time."""

    text: str
    """Load as the user writes it, for reports."""
    pattern_rps: NDArray[np.float64]
    """[S], the rate in each second."""
    repeats: bool = False
    """The pattern repeats after its end; otherwise its last rate holds."""
    natural_seconds: int | None = None
    """Length of the load; None if it has no end."""
    gap_seconds: int = 0
    """Seconds of a trace without counts; no requests are sent in them."""
    traffic: Traffic | None = None
    """Multimodal rates, whose sum is the pattern."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a load such as `20` (`constant:20`), `step:5,40@60`, `steps:5x30,20x30` or `generated:low=4,high=40`.

        `multimodal:rps=5` is a load of chats with the rates of a production cluster, each minute played in a second.
        Raises LoadError if the form is unknown, or a number is out of bounds.
        """
        kind, colon, body = (f"constant:{text.strip()}" if is_number(text) else text.strip()).partition(":")
        reader = _KINDS.get(kind)
        if reader is None or not colon:
            raise LoadError(f"load {text!r} is not known; write {_FORMS}")
        try:
            return cls(text.strip(), **reader(body))
        except LoadError as error:
            raise LoadError(f"load {text!r}: {error}") from None

    @classmethod
    def from_counts(cls, counts: NDArray[np.float64], text: str, *, speed_up: float = 1.0, scale: float = 1.0) -> Self:
        """Make a load of request counts per second, [S]; a missing count is NaN.

        `speed_up` plays time faster at the same rates: each played second has the mean of `speed_up` recorded ones.
        `scale` multiplies the rates. A played second without any recorded count has rate 0 and counts as a gap. Raises
        LoadError if there are no counts, a count is negative or infinite, or a factor is out of bounds.
        """
        for name, factor in (("speed-up", speed_up), ("scale", scale)):
            if not (np.isfinite(factor) and 0 < factor <= MAX_RPS):
                raise LoadError(f"{name} {factor:g} must be above 0 and finite")
        invalid = np.flatnonzero(np.isinf(counts) | (counts < 0))
        if counts.size == 0 or invalid.size:
            problem = "is empty" if not invalid.size else f"has {counts[invalid[0]]:g} requests in second {invalid[0]}"
            raise LoadError(f"trace {text} {problem}; it needs one count of at least 0 for each second")
        played = _compress(np.asarray(counts, dtype=np.float64), speed_up) * scale
        gaps = np.isnan(played)
        rates = _checked(np.where(gaps, 0.0, played), f"trace {text}")
        return cls(text, rates, repeats=True, natural_seconds=rates.size, gap_seconds=int(gaps.sum()))

    @classmethod
    def from_trace(cls, trace: Path | Trace, *, speed_up: float = 1.0, scale: float = 1.0) -> Self:
        """Make a load of a per-second trace.

        Raises TraceError if the file is not a trace; the message names the line. Raises LoadError as `from_counts`.
        """
        recorded = read_trace(trace) if isinstance(trace, Path) else trace
        return cls.from_counts(recorded.rps, recorded.name, speed_up=speed_up, scale=scale)

    def rates(self, duration_seconds: float | None = None) -> NDArray[np.float64]:
        """Rate in each second, [ceil(duration)]; None is the length of the load.

        Raises LoadError if there is no duration and the load has no end, or the duration is out of bounds.
        """
        if duration_seconds is None:
            if self.natural_seconds is None:
                raise LoadError(f"load {self.text!r} has no end; give a duration in seconds")
            return self.pattern_rps[: self.natural_seconds]
        if not 0 < duration_seconds <= MAX_PATTERN_SECONDS:
            raise LoadError(f"duration {duration_seconds:g} s must be above 0 and at most {MAX_PATTERN_SECONDS} s")
        seconds, size = int(np.ceil(duration_seconds)), self.pattern_rps.size
        index = np.arange(seconds)
        return self.pattern_rps[index % size if self.repeats else np.minimum(index, size - 1)]


def _compress(counts: NDArray[np.float64], speed_up: float) -> NDArray[np.float64]:
    """Mean count of the recorded seconds of each played second; NaN if none has a count."""
    if speed_up == 1:
        return counts
    if speed_up < 1:  # rounded, since 21 / 0.7 is a little above 30, and 100 times 0.29 a little below 29
        played_seconds = np.arange(int(np.ceil(round(counts.size / speed_up, 6))))
        recorded = np.round(played_seconds * speed_up, 6).astype(np.int64)
        return counts[np.minimum(recorded, counts.size - 1)]
    played = (np.arange(counts.size) / speed_up).astype(np.int64)
    counted = ~np.isnan(counts)
    totals = np.bincount(played, weights=np.where(counted, counts, 0.0))
    numbers = np.bincount(played, weights=counted.astype(np.float64))
    means: NDArray[np.float64] = np.divide(totals, numbers, out=np.full(totals.size, np.nan), where=numbers > 0)
    return means


def _checked(rates: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    if rates.max() > MAX_RPS:
        raise LoadError(f"{name}: {rates.max():g} rps is above the maximum of {MAX_RPS:g}")
    return rates


def _number(text: str, name: str, *, minimum: float = 0.0, maximum: float = MAX_RPS) -> float:
    try:
        value = float(text)
    except ValueError:
        raise LoadError(f"{name} {text!r} is not a number; write {_FORMS}") from None
    if not minimum <= value <= maximum:
        raise LoadError(f"{name} {text} must lie between {minimum:g} and {maximum:g}")
    return value


def _seconds(text: str, name: str) -> int:
    value = _number(text, name, minimum=1, maximum=MAX_PATTERN_SECONDS)
    if value != int(value):
        raise LoadError(f"{name} {text} must be a whole number of seconds")
    return int(value)


_Fields = Mapping[str, Any]
"""_Fields of a `LoadSpec`."""


def _constant(body: str) -> _Fields:
    return {"pattern_rps": np.array([_number(body, "rate")])}


def _step(body: str) -> _Fields:
    match = re.fullmatch(r"([^,@]+),([^,@]+)@([^,@]+)", body)
    if match is None:
        raise LoadError("a step is written RPS,RPS@SECOND, such as step:5,40@60")
    before, after = _number(match[1], "rate"), _number(match[2], "rate")
    return {"pattern_rps": np.concatenate([np.full(_seconds(match[3], "second"), before), [after]])}


def _steps(body: str) -> _Fields:
    steps = []
    for step in body.split(","):
        rate, cross, seconds = step.partition("x")
        if not cross:
            raise LoadError(f"{step!r} is not RPSxSECONDS; write for instance steps:5x30,20x30")
        steps.append(np.full(_seconds(seconds, "length"), _number(rate, "rate")))
    rates = np.concatenate(steps)
    return {"pattern_rps": rates, "natural_seconds": rates.size}


def _generated(body: str) -> _Fields:
    fields = _read_pairs(body, _GENERATED_DEFAULTS, "low=RPS, high=RPS, seed=NUMBER, plateau=SECONDS")
    low, high = _number(fields["low"], "low"), _number(fields["high"], "high")
    if low > high:
        raise LoadError(f"low {low:g} is above high {high:g}")
    plateau = _seconds(fields["plateau"], "plateau")
    rates = generate_rates(low, high, _seed(fields["seed"]), GENERATED_SECONDS, plateau)
    return {"pattern_rps": rates, "repeats": True}


def _multimodal(body: str) -> _Fields:
    fields = _read_pairs(body, _MULTIMODAL_DEFAULTS, "rps=RPS, seed=NUMBER")
    rps, seed = _number(fields["rps"], "rps", minimum=MIN_RPS), _seed(fields["seed"])
    traffic = replace(synthetic_rates(GENERATED_SECONDS, seed).scaled(rps), interval_seconds=1.0)
    return {"pattern_rps": traffic.rps, "repeats": True, "traffic": traffic}


def _read_pairs(body: str, defaults: Mapping[str, str], expected: str) -> dict[str, str]:
    """Parse `key=value,…`; a missing key has its default."""
    values: dict[str, str] = {}
    for pair in filter(None, body.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in defaults or key in values:
            raise LoadError(f"{pair!r} is not one of {expected}, each once")
        values[key] = value
    return {**defaults, **values}


def _seed(text: str) -> int:
    seed = _number(text, "seed", maximum=2**32)
    if seed != int(seed):
        raise LoadError(f"seed {text} must be a whole number")
    return int(seed)


_GENERATED_DEFAULTS: Mapping[str, str] = {"low": "4", "high": "40", "seed": "0", "plateau": "30"}
_MULTIMODAL_DEFAULTS: Mapping[str, str] = {"rps": "5", "seed": "0"}
_KINDS: Mapping[str, Callable[[str], _Fields]] = {
    "constant": _constant,
    "step": _step,
    "steps": _steps,
    "generated": _generated,
    "multimodal": _multimodal,
}


def generate_rates(
    low_rps: float, high_rps: float, seed: int, seconds: int, plateau_seconds: int = 30
) -> NDArray[np.float64]:
    """Generate requests per second, [seconds], each within low_rps … high_rps.

    The same arguments give the same rates, and a longer load begins with the shorter one. A plateau lasts 0.7 to 1.3
    times `plateau_seconds`.
    """
    random = np.random.default_rng(seed)
    levels = np.geomspace(max(low_rps, 1e-3 * high_rps, 1e-9), max(high_rps, 1e-9), LEVELS_PER_ROUND)
    plateaus: list[NDArray[np.float64]] = []
    length = 0
    while length < seconds:
        for level in random.permutation(levels):
            plateaus.append(_plateau(float(level), plateau_seconds, random))
            length += plateaus[-1].size
    rates: NDArray[np.float64] = np.concatenate([np.empty(0), *plateaus])[:seconds].clip(low_rps, high_rps)
    return rates


def _plateau(level_rps: float, mean_seconds: int, random: np.random.Generator) -> NDArray[np.float64]:
    rates = np.full(max(1, round(mean_seconds * random.uniform(0.7, 1.3))), level_rps)
    burst = random.random() < BURST_PROBABILITY
    start, length = int(random.integers(rates.size)), int(random.integers(*BURST_SECONDS))
    if burst:
        rates[start : start + length] *= BURST_FACTOR
    return rates
