"""Progress bar of a run: elapsed time, requests sent, and their outcomes."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trimtab_loadtester.attack import OnProgress, Progress
from trimtab_pipelines.request_outcome import RequestOutcome


def describe(progress: Progress) -> str:
    """Format the counts of sent requests and of each outcome that occurred as one line."""
    parts = [
        f"{count} {outcome.word}"
        for outcome, count in progress.outcomes.items()
        if count or outcome is RequestOutcome.OK
    ]
    waiting = progress.sent - sum(progress.outcomes.values())
    return f"{progress.sent}/{progress.scheduled} sent · {' · '.join(parts)} · {waiting} waiting"


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[OnProgress]:
    """Show a bar while the block runs; yields the `on_progress` callback of `attack`."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("waiting for the first request", total=None)

        def show(progress: Progress) -> None:
            done = min(progress.elapsed_seconds, progress.duration_seconds)
            bar.update(task, total=progress.duration_seconds, completed=done, description=describe(progress))

        yield show
