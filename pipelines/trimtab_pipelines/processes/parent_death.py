"""Launcher of a module that ends with its parent process.

Usage: `python -m trimtab_pipelines.processes.parent_death PARENT MODULE …`, or `PARENT --exec COMMAND …`; with
`--exec-nice` the command has the priority of a model server.

The kernel kills it when its parent ends, so that even `kill -9` of `trimtab up` leaves no process behind.
"""

import ctypes
import os
import runpy
import signal
import sys
from typing import NoReturn

from trimtab_pipelines.processes.priority import lower_priority

_PR_SET_PDEATHSIG = 1
EXEC, EXEC_NICE = "--exec", "--exec-nice"


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; only on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def command_tied_to_parent(module: str, *arguments: str) -> list[str]:
    """Command that runs `python -m MODULE …` and ends with this process."""
    return [sys.executable, "-m", "trimtab_pipelines.processes.parent_death", str(os.getpid()), module, *arguments]


def main() -> None:
    """Tie this process to its parent, then run the module or the command."""
    parent, module, *arguments = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):
        return  # the parent ended before prctl
    if module == EXEC_NICE:
        lower_priority()
    if module in {EXEC, EXEC_NICE}:
        _run_command(arguments)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_command(command: list[str]) -> NoReturn:
    try:
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        sys.stderr.write(f"command {command[0]}: {error.strerror}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
