"""What the terminal shows while a run goes on."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.pipelines import write_echo_pipeline
from tests.cli.runs import a_run, plans
from trimtab.local.supervisor import Fault, Setup, Supervisor
from trimtab.run import LocalRun
from trimtab.run_record import Recorder
from trimtab.terminal_view import terminal_view
from trimtab_loadtester.attack import Progress
from trimtab_pipelines.request_outcome import RequestOutcome


@pytest.fixture
def session(tmp_path: Path) -> LocalRun:
    """A session half-way, without any process."""
    setup = Setup(write_echo_pipeline(tmp_path), tmp_path / "run")
    session = LocalRun("sample", setup)
    session.supervisor = Supervisor(setup)
    session.supervisor.plan = plans()[1]
    session.recorder = Recorder(setup.folder, "sample", session.supervisor.pipeline)
    session.progress = Progress(60.0, 120.0, 1200, 600, dict.fromkeys(RequestOutcome, 100))
    return session


def shown(session: LocalRun, *, terminal: bool) -> str:
    """Play sixty seconds; return what was printed."""
    output = StringIO()
    console = Console(file=output, force_terminal=terminal, width=150, soft_wrap=True, highlight=False)
    with terminal_view(session, console):
        for sample in a_run().samples[:61]:
            session.record_sample(sample)
    return output.getvalue()


def test_a_log_gets_plain_lines(session: LocalRun) -> None:
    """One line in ten seconds with load, plan, latency and what runs; a fault gets a line of its own, once."""
    session.supervisor.faults.append(Fault(a_run().samples[30].at - 0.5, "replica first-0 ended"))
    lines = shown(session, terminal=False).splitlines()
    assert lines.count("! replica first-0 ended") == 1
    assert len(lines) == 8
    assert lines[-1] == (
        "load 10.0 requests/s · planned for 12.0 (lstm) · p50 ≤ 500 ms, p99 ≤ 2000 ms of 2000 · cores 1.5/2 · 60/120 s"
        " · first: slow ×1 batch 8, second: slow ×1 batch 8"
    )


def test_a_terminal_gets_a_table_that_stays(session: LocalRun) -> None:
    """Each stage has a row: what runs, and what the plan wants where that is another."""
    text = shown(session, terminal=True)
    assert "\x1b[" in text
    assert "fast → slow" in text
    assert "expected accuracy of the answers 0.8800" in text
    assert "plan 2: to slow <because>" in text
