"""Terminal view of a run."""

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
def local_run(tmp_path: Path) -> LocalRun:
    """A run half-way, without processes."""
    setup = Setup(write_echo_pipeline(tmp_path), tmp_path / "run")
    local_run = LocalRun("sample", setup)
    local_run.supervisor = Supervisor(setup)
    local_run.supervisor.plan = plans()[1]
    local_run.recorder = Recorder(setup.folder, "sample", local_run.supervisor.pipeline)
    local_run.progress = Progress(60.0, 120.0, 1200, 600, dict.fromkeys(RequestOutcome, 100))
    return local_run


def shown(local_run: LocalRun, *, terminal: bool) -> str:
    output = StringIO()
    console = Console(file=output, force_terminal=terminal, width=150, soft_wrap=True, highlight=False)
    with terminal_view(local_run, console):
        for sample in a_run().samples[:61]:
            local_run.record_sample(sample)
    return output.getvalue()


def test_log_gets_plain_lines(local_run: LocalRun) -> None:
    """One line in ten seconds with load, plan, latency and stages; a fault gets its own line, once."""
    local_run.supervisor.faults.append(Fault(a_run().samples[30].at - 0.5, "replica first-0 ended"))
    lines = shown(local_run, terminal=False).splitlines()
    assert lines.count("! replica first-0 ended") == 1
    assert len(lines) == 8
    assert lines[-1] == (
        "load 10.0 requests/s · planned for 12.0 (lstm) · p50 ≤ 500 ms, p99 ≤ 2000 ms, SLO 2000 ms · cores 1.5/2"
        " · 60/120 s · first: slow ×1 batch 8, second: slow ×1 batch 8"
    )


def test_terminal_gets_a_table(local_run: LocalRun) -> None:
    text = shown(local_run, terminal=True)
    assert "\x1b[" in text
    assert "fast → slow" in text
    assert "expected accuracy 0.8800" in text
    assert "plan 2: to slow <because>" in text
