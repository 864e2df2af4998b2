"""`python -m benchmarks.first_week`: what a stranger does in the first week, as checks by area.

Each check runs the command line as a user would, on a small pipeline of two stages; clients and rights that are not
there are skipped by name. The last line is one of JSON: counts by area, what does not hold, and the bars.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.first_week import commands, documents, faults, own, protocol, records
from benchmarks.first_week.checking import AREAS, carry_out, outcome_of
from trimtab.app import run_reporting_errors

CHECKS = (*documents.CHECKS, *commands.CHECKS, *protocol.CHECKS, *records.CHECKS, *own.CHECKS, *faults.CHECKS)


def main() -> int:
    """Carry the checks out; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.first_week", description=__doc__)
    parser.add_argument("--area", choices=AREAS, action="append", help="only checks of this area; repeat")
    parser.add_argument("--only", default="", help="only checks whose name has these words")
    return run_reporting_errors(partial(_carry_out, parser.parse_args()))


def _carry_out(given: argparse.Namespace) -> int:
    chosen = [c for c in CHECKS if c.area in (given.area or AREAS) and given.only in c.name]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="trimtab-week-") as name:
        for number, check in enumerate(chosen):
            folder = Path(name) / str(number)
            folder.mkdir()
            verdicts.append(carry_out(check, folder))
            sys.stdout.write(f"{verdicts[-1].outcome}: {check.area}: {check.name}: {verdicts[-1].seen.words}\n")
            sys.stdout.flush()
    outcome = outcome_of(verdicts)
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
