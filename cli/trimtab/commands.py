"""All verbs of the command line, and what becomes of their errors."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from trimtab.local.replicas import end_fork_server
from trimtab.local.router_client import RouterUnreachable
from trimtab.verbs import (
    accuracy,
    compare,
    demo,
    explain,
    keys,
    load,
    page,
    plan,
    profile,
    report,
    simulate,
    status,
    up,
)
from trimtab_adapter.planning.decide import PlanningError
from trimtab_adapter.planning.what_if import WhatIfError
from trimtab_loadtester.load import LoadError
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.processes.module import StartError
from trimtab_predictor.trace import TraceError
from trimtab_profiler.replica import ProfileError

USERS_FAULT = (DocumentError, LoadError, TraceError, WhatIfError)
FAILURES = (StartError, RouterUnreachable, ProfileError, PlanningError, OSError, ValueError)


def exiting(command: Callable[..., int]) -> Callable[..., None]:
    """Make the value a verb returns the command's exit code."""

    @wraps(command)
    def exit_with_code(*arguments: object, **options: object) -> None:
        raise typer.Exit(command(*arguments, **options))

    return exit_with_code


def _tell_version(asked: bool) -> None:  # noqa: FBT001  (as typer calls it)
    if asked:
        typer.echo(f"trimtab {version_of('trimtab')}")
        raise typer.Exit


app = typer.Typer(
    name="trimtab",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Serves multi-stage machine-learning pipelines, adapting variants, batch sizes and replicas to the load.",
)


@app.callback()
def _of_all(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is")
    ] = False,
) -> None:
    """Options before any verb."""


for verb in (up, load, profile, accuracy, plan, explain, simulate, compare, report, page, status, demo):
    app.command(verb.__name__.rpartition(".")[2])(exiting(verb.command))
of_keys = typer.Typer(no_args_is_help=True, help="API keys of those who may call a pipeline.")
of_keys.command("new")(exiting(keys.new))
app.add_typer(of_keys, name="keys")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return reporting_errors(lambda: app(args=list(arguments), prog_name="trimtab"))


def reporting_errors(work: Callable[[], object]) -> int:
    """Do it; turn what the user got wrong into exit code 2, what failed into 1, each with one message.

    SIGTERM ends it as Ctrl-C does, with all that it started.
    """
    with _terminable() as terminated:
        try:
            code = work()
        except SystemExit as end:  # so typer ends, having shown what was wrong with the options
            code = end.code
        except USERS_FAULT as error:
            return _fail(str(error), 2)
        except FAILURES as error:
            return _fail(str(error) or type(error).__name__, 1)
        except KeyboardInterrupt:
            code = 130 if terminated else _fail("interrupted", 130)
        finally:
            end_fork_server()
    if terminated:
        return _fail("terminated", 143)
    return code if isinstance(code, int) else 0


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM interrupt as Ctrl-C does; tells whether it came. Only a main thread hears signals."""
    terminated: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, _: object) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)  # asyncio and all others know how to end by it

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trimtab: {message}\n")
    return code
