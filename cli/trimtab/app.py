"""All verbs of the command line, and what becomes of their errors.

A verb's module is imported when it is asked for: the others would take seconds.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from trimtab_pipelines.errors import OperationFailed, UserError

VERBS = {
    "up": "Serve a pipeline on this machine, adapted to its load, until Ctrl-C or the end of the load.",
    "loadtest": "Send a load to a pipeline that runs already: open loop, real inputs, every request accounted for.",
    "profile": "Measure latency and throughput of every variant, operating point, batch size and allocation of cores.",
    "evaluate": "Measure the accuracy of every variant and operating point on your own samples; write it into the "
    "pipeline.",
    "tune": "Find operating points for a vision transformer: how many tokens to merge, by which rule, in which "
    "precision.",
    "train-task": "Train a new task for a vision transformer: a head, and prompts, for every way that its points run.",
    "plan": "Show what would run at a load, and why, without running it.",
    "explain": "Explain the plan for a load: what binds, what comes second, what a little more or less would cost.",
    "simulate": "Simulate a pipeline under a load with the router's own code: what would be late or dropped, and at "
    "what cost.",
    "compare": "Serve the same arrivals and payloads three times: adapted live, lightest and heaviest variants; "
    "compare.",
    "report": "Make the HTML report of one recorded run, or of several compared.",
    "dashboard": "Serve the page that shows a run while it goes on: what comes, what runs and why, drops, accuracy, each "
    "stage.",
    "status": "Show what a router runs now, and what became of its requests; exits with 1 where it is not ready.",
    "demo": "Serve the digits pipeline under a changing load, adapt it live, and show what happened.",
}
"""Each verb with the first line of its help, as its module says it too."""
KEYS, KEYS_HELP = "keys", "API keys of those who may call a pipeline."
_COMPLETED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Where a shell that asks for completions puts the words so far."""


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


def _of_all(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is")
    ] = False,
) -> None:
    """Options before any verb."""


def _elsewhere() -> None:
    """Stand in for a verb that was not asked for."""


def build_app(verb: str | None) -> typer.Typer:
    """The command line with one verb imported; the others are listed only."""
    app = typer.Typer(
        name="trimtab",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        help="Serves multi-stage machine-learning pipelines, adapting variants, batch sizes and replicas to the load.",
    )
    app.callback()(_of_all)
    for name, words in VERBS.items():
        if name == verb:
            app.command(name)(exiting(command_module(name).command))
        else:
            app.command(name, help=words)(_elsewhere)
    of_keys = typer.Typer(no_args_is_help=True, help=KEYS_HELP)
    of_keys.command("new")(exiting(command_module(KEYS).new) if verb == KEYS else _elsewhere)
    app.add_typer(of_keys, name=KEYS)
    return app


def command_module(name: str) -> Any:
    """The module of a verb."""
    return import_module(f"trimtab.commands.{name.replace('-', '_')}")


def command_name(arguments: Sequence[str]) -> str | None:
    """The verb that a command line asks for, or the one whose options a shell wants to complete."""
    if "_TRIMTAB_COMPLETE" in os.environ:
        arguments = next((os.environ[name].split()[1:] for name in _COMPLETED if name in os.environ), ())
    return next((word for word in arguments if not word.startswith("-")), None)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return run_reporting_errors(lambda: build_app(command_name(arguments))(args=list(arguments), prog_name="trimtab"))


def run_reporting_errors(work: Callable[[], object]) -> int:
    """Do it; turn what the user got wrong into exit code 2, what failed into 1, each with one message.

    SIGTERM ends it as Ctrl-C does, with all that it started.
    """
    with _terminable() as terminated:
        try:
            code = work()
        except SystemExit as end:  # so typer ends, having shown what was wrong with the options
            code = end.code
        except UserError as error:
            return _fail(str(error), 2)
        except (OperationFailed, OSError, ValueError) as error:
            if not terminated:
                return _fail(str(error) or type(error).__name__, 1)
            code = 1  # what was cut short may fail on its way out; that is no reason of its own
        except KeyboardInterrupt:
            code = 130 if terminated else _fail("interrupted", 130)
        finally:
            _end_fork_server()
    if terminated:
        return _fail("terminated", 143)
    return code if isinstance(code, int) else 0


def _end_fork_server() -> None:
    """End the server that replicas are forked from, where one was ever begun."""
    replicas = sys.modules.get("trimtab.local.replica_process")
    if replicas is not None:
        replicas.stop_fork_server()


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """Let SIGTERM interrupt as Ctrl-C does; tells whether it came. Only a main thread hears signals."""
    terminated: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, _: object) -> None:
        terminated.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for what they start in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio and all others know how to end by it

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trimtab: {message}\n")
    return code
