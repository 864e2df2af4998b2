"""Check of the first week, and the output of its verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from benchmarks.clients.tools import AbsentError
from trimtab_pipelines.result_line import ResultLine, threshold

Area = Literal[
    "documents",
    "command line",
    "protocol",
    "clients",
    "own models",
    "own samples",
    "live page",
    "folders",
    "faults",
    "records",
]
AREAS: tuple[Area, ...] = get_args(Area)


class BrokenPromiseError(Exception):
    """What a check found instead of what was promised."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: `run` takes an empty folder, and returns in a few words what it saw; figures may be added."""

    area: Area
    name: str
    run: Callable[[Path], "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check saw: a few words, and figures with units in their names."""

    words: str
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one check."""

    check: Check
    outcome: Literal["holds", "broken", "skipped"]
    seen: Seen


def require(holds: object, words: str) -> None:
    """Raise BrokenPromiseError with these words, unless it holds."""
    if not holds:
        raise BrokenPromiseError(words)


def carry_out(check: Check, folder: Path) -> Verdict:
    """Carry a check out; nothing it does stops the others."""
    try:
        return Verdict(check, "holds", check.run(folder))
    except AbsentError as reason:
        return Verdict(check, "skipped", Seen(str(reason)))
    except Exception as error:  # noqa: BLE001  (the next check is tried whatever happened in this one)
        return Verdict(check, "broken", Seen(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"))


def outcome_of(verdicts: Sequence[Verdict], areas: Iterable[str] = AREAS) -> ResultLine:
    """Count the checks by area; every one that was tried must hold."""
    figures: dict[str, float | int | str | None] = {}
    for area in areas:
        own = [verdict for verdict in verdicts if verdict.check.area == area]
        if own:
            counts = (f"{sum(v.outcome == kind for v in own)} {kind}" for kind in ("holds", "broken", "skipped"))
            figures[area] = ", ".join(counts)
    for verdict in verdicts:
        figures |= verdict.seen.figures
        if verdict.outcome != "holds":
            figures[verdict.check.name] = f"{verdict.outcome}: {verdict.seen.words}"
    broken = sum(verdict.outcome == "broken" for verdict in verdicts)
    held = sum(verdict.outcome == "holds" for verdict in verdicts)
    bars = (threshold("checks that are broken", broken, "==", 0), threshold("checks that hold", held, ">=", 1))
    return ResultLine(name="first-week", figures={"checks": len(verdicts), **figures}, bars=bars)
