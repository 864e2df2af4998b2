"""The checks of the first week are counted by area, and nothing one does stops the others."""

from pathlib import Path

from benchmarks.clients.tools import AbsentError
from benchmarks.first_week.__main__ import CHECKS
from benchmarks.first_week.checking import AREAS, Check, Seen, carry_out, outcome_of, require


def holds(_: Path) -> Seen:
    return Seen("as promised", {"waited_seconds": 1.5})


def breaks(_: Path) -> Seen:
    require(holds=False, words="another than promised")
    return Seen("never")


def lacks(_: Path) -> Seen:
    raise AbsentError("no such tool here")


def test_checks_are_counted_by_area(tmp_path: Path) -> None:
    verdicts = [
        carry_out(check, tmp_path)
        for check in (
            Check("faults", "one", holds),
            Check("faults", "two", breaks),
            Check("records", "three", lacks),
        )
    ]
    outcome = outcome_of(verdicts)
    assert outcome.figures == {
        "checks": 3,
        "faults": "1 holds, 1 broken, 0 skipped",
        "records": "0 holds, 0 broken, 1 skipped",
        "waited_seconds": 1.5,
        "two": "broken: BrokenPromiseError: another than promised",
        "three": "skipped: no such tool here",
    }
    assert not outcome.holds
    assert outcome_of(verdicts[:1]).holds


def test_every_area_has_checks_of_names_of_their_own() -> None:
    assert {check.area for check in CHECKS} == set(AREAS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
