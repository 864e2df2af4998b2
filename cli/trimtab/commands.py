"""All verbs of the command line, and what becomes of their errors."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps

import typer

from trimtab.local.processes import StartError
from trimtab.local.replicas import end_fork_server
from trimtab.local.router_client import RouterUnreachable
from trimtab.verbs import compare, demo, explain, keys, load, plan, profile, report, simulate, status, up
from trimtab_adapter.decide import PlanningError
from trimtab_adapter.what_if import WhatIfError
from trimtab_loadtester.load import LoadError
from trimtab_pipelines.documents import DocumentError
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


app = typer.Typer(
    name="trimtab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves multi-stage machine-learning pipelines, adapting variants, batch sizes and replicas to the load.",
)
for verb in (up, load, profile, plan, explain, simulate, compare, report, status, demo):
    app.command(verb.__name__.rpartition(".")[2])(exiting(verb.command))
of_keys = typer.Typer(no_args_is_help=True, help="API keys of those who may call a pipeline.")
of_keys.command("new")(exiting(keys.new))
app.add_typer(of_keys, name="keys")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return reporting_errors(lambda: app(args=list(arguments), prog_name="trimtab"))


def reporting_errors(work: Callable[[], object]) -> int:
    """Do it; turn what the user got wrong into exit code 2, what failed into 1, each with one message."""
    try:
        code = work()
    except SystemExit as end:  # so typer ends, having shown what was wrong with the options
        code = end.code
    except USERS_FAULT as error:
        return _fail(str(error), 2)
    except FAILURES as error:
        return _fail(str(error) or type(error).__name__, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    finally:
        end_fork_server()
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trimtab: {message}\n")
    return code
