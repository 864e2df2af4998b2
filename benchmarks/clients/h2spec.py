"""h2spec: does the gRPC door keep to HTTP/2? Every case that fails must be explained in docs/develop/h2spec.md."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.clients.target import Target, WrongAnswerError
from benchmarks.clients.tools import ROOT, output_of, program

EXPLAINED = ROOT / "docs" / "develop" / "h2spec.md"
CASE_SECONDS = 3
MOST_RUNS_AGAIN = 2
_ROW = re.compile(r"^\| `(?P<section>[a-z0-9/.]+)` \| (?P<case>[^|]+?) \|")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One of h2spec's cases: the section of the RFC it is in, such as `http2/5.1`, and what it does."""

    section: str
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """What became of all cases; of those that failed, what was expected and what came."""

    cases: int
    failed: Mapping[Case, str]


def h2spec(target: Target) -> str:
    """Run all cases; raise WrongAnswerError naming those that fail unexplained, each time they are run.

    A case breaks a rule on a stream that the door refuses meanwhile; which comes first is a race that a busy machine
    decides anew each time. What the door does wrong it does wrong each time.
    """
    report, known = _run(target), explained(EXPLAINED.read_text())
    unexplained = report.failed.keys() - known
    for _ in range(MOST_RUNS_AGAIN):
        if unexplained:
            again = _run(target, *sorted({case.section for case in unexplained}))
            unexplained &= again.failed.keys()
    if unexplained:
        raise WrongAnswerError(_told(sorted(unexplained), report))
    lost = len(report.failed.keys() - known)
    return f"{report.cases} cases, {len(report.failed) - lost} fail and are explained, {lost} failed once"


def _run(target: Target, *sections: str) -> Report:
    """Run the cases of some sections, of all where none is named."""
    host, _, port = target.grpc.rpartition(":")
    security = ["--tls", "--insecure"] if target.ca else []
    with tempfile.TemporaryDirectory(prefix="trimtab-clients-") as folder:
        path = Path(folder) / "report.xml"
        where = ["--host", host, "--port", port, "--timeout", str(CASE_SECONDS), "--junit-report", str(path)]
        output_of([program("h2spec"), *sections, *where, *security], codes=(0, 1))
        return read_report(path.read_bytes())


def read_report(content: bytes) -> Report:
    """Read a JUnit report; h2spec writes the bytes of odd frames into it as they are."""
    root = ET.fromstring(_NOT_XML.sub("�", content.decode(errors="replace")))  # noqa: S314  (we had it written)
    cases = list(root.iter("testcase"))
    if not cases:
        raise WrongAnswerError("h2spec ran no case: was there a server?")
    failed = {
        Case(case.get("package", ""), case.get("classname", "")): " ".join((outcome.text or "").split())
        for case in cases
        for outcome in case
        if outcome.tag in {"error", "failure"}
    }
    return Report(len(cases), failed)


def explained(page: str) -> frozenset[Case]:
    """The cases in the page's table, whose first two columns are the section and the case."""
    rows = (_ROW.match(line) for line in page.splitlines())
    return frozenset(Case(row["section"], row["case"]) for row in rows if row)


def _told(unexplained: Sequence[Case], report: Report) -> str:
    words = "; ".join(f"{case.section} {case.what}: {report.failed[case]}" for case in unexplained)
    return f"{len(unexplained)} of {report.cases} cases fail and {EXPLAINED.name} does not say why: {words}"
