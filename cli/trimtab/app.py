"""Command line: its commands, their exit codes, and the reporting of errors.

The module of a command is imported only when that command runs: importing all of them takes seconds.
"""

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from trimtab_pipelines.errors import OperationFailed, UserError

COMMANDS = {
    "up": "Serve a pipeline on this machine and adapt it to its load, until the load ends or Ctrl-C.",
    "loadtest": "Send an open-loop load of real inputs to a running pipeline and account for every request.",
    "profile": "Measure latency and throughput of every variant, operating point, batch size and core allocation.",
    "evaluate": "Measure the accuracy of every variant and operating point on samples; write it into the pipeline.",
    "tune": "Find operating points of a vision transformer: token merging rates, merge rules and precisions.",
    "train-task": "Train a new task for a vision transformer: a head and prompts for each of its operating points.",
    "push": "Upload local weights with their digests to S3 or MinIO (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …).",
    "mirror": "Copy a pipeline's weights from the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN) to S3, MinIO or a folder.",
    "plan": "Show the plan for a load without running it.",
    "explain": "Explain the plan for a load: its binding constraint, the runner-up, and its sensitivity.",
    "simulate": "Simulate a pipeline under a load with the router's own scheduler.",
    "compare": "Serve the same load with adaptation, with the lightest and with the heaviest variants; compare.",
    "checkpoints": "Write a copy of a pipeline whose Hugging Face checkpoints are miniatures with random weights.",
    "report": "Write the HTML report of one recorded run, or of several compared.",
    "dashboard": "Serve the live page of a run: load, plans, drops, accuracy and every stage.",
    "status": "Show what a router serves and the outcomes of its requests; exit with 1 if it is not ready.",
    "demo": "Serve the digits pipeline under a changing load, adapt it live, and report the run.",
}
"""Each command with the first line of its help, equal to the first line of its function's docstring."""
KEYS, KEYS_HELP = "keys", "Manage the API keys of a pipeline's clients."
_COMPLETION_VARIABLES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Environment variables in which a shell passes the command line to complete."""


def with_exit_code(command: Callable[..., int]) -> Callable[..., None]:
    """Exit with the command's return value; expand each parameter that is a dataclass into options of its fields."""
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if option.default is MISSING else option.default,
                    annotation=option.type,
                )
                for option in fields(parameter.annotation)
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def exit_with_code(**options: Any) -> None:
        for name, group in groups.items():
            options[name] = group(**{option.name: options.pop(option.name) for option in fields(group)})
        raise typer.Exit(command(**options))

    exit_with_code.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return exit_with_code


def _print_version(requested: bool) -> None:  # noqa: FBT001  (typer's signature)
    if requested:
        typer.echo(f"trimtab {version_of('trimtab')}")
        raise typer.Exit


def _global_options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Options before any command."""


def _not_imported() -> None:
    """Stand in for a command that does not run."""


def build_app(name: str | None) -> typer.Typer:
    """Build the command line with one command imported; the others are only listed."""
    app = typer.Typer(
        name="trimtab",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        help="Serves multi-stage inference pipelines and adapts variants, batch sizes and replicas to the load.",
    )
    app.callback()(_global_options)
    for command, help_text in COMMANDS.items():
        if command == name:
            app.command(command)(with_exit_code(command_module(command).command))
        else:
            app.command(command, help=help_text)(_not_imported)
    keys = typer.Typer(no_args_is_help=True, help=KEYS_HELP)
    keys.command("new")(with_exit_code(command_module(KEYS).new) if name == KEYS else _not_imported)
    app.add_typer(keys, name=KEYS)
    return app


def command_module(name: str) -> Any:
    return import_module(f"trimtab.commands.{name.replace('-', '_')}")


def command_name(arguments: Sequence[str]) -> str | None:
    """Return the command of a command line, or of the command line that a shell asks to complete."""
    if "_TRIMTAB_COMPLETE" in os.environ:
        arguments = next((os.environ[name].split()[1:] for name in _COMPLETION_VARIABLES if name in os.environ), ())
    return next((word for word in arguments if not word.startswith("-")), None)


def run(arguments: Sequence[str]) -> int:
    return run_reporting_errors(lambda: build_app(command_name(arguments))(args=list(arguments), prog_name="trimtab"))


def run_reporting_errors(work: Callable[[], object]) -> int:
    """Run `work` and return its exit code: 2 for a user's error, 1 for a failure, each with a one-line message.

    SIGTERM ends it as Ctrl-C does, with all processes that it started.
    """
    with _interrupt_on_sigterm() as terminated:
        try:
            code = work()
        except SystemExit as end:  # typer has printed the error in the options
            code = end.code
        except UserError as error:
            return _fail(str(error), 2)
        except (OperationFailed, OSError, ValueError) as error:
            if not terminated:
                return _fail(str(error) or type(error).__name__, 1)
            code = 1  # an error caused by the termination
        except KeyboardInterrupt:
            code = 130 if terminated else _fail("interrupted", 130)
        finally:
            _stop_fork_server()
    if terminated:
        return _fail("terminated", 143)
    return code if isinstance(code, int) else 0


def _stop_fork_server() -> None:
    processes = sys.modules.get("trimtab_pipelines.processes.forked_process")
    if processes is not None:
        processes.stop_fork_server()


@contextmanager
def _interrupt_on_sigterm() -> Iterator[list[int]]:
    """Handle SIGTERM as Ctrl-C; yield a list that is not empty once it came. Only a main thread receives signals."""
    terminated: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield terminated
        return

    def terminate(number: int, _: object) -> None:
        terminated.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells ignore it for background jobs
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # asyncio ends cleanly on SIGINT

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"trimtab: {message}\n")
    return code
