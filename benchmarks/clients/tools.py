"""Programs that are not ours, found or installed as hack/clients pins them, and run."""

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "hack" / "clients" / "install"
RUN_SECONDS = 120.0


class AbsentError(Exception):
    """A client that cannot be installed here; says why."""


class ProgramError(Exception):
    """A client ended with an exit code of its own."""


@functools.cache
def installed(which: Literal["go", "node", "kserve", "openai", "langchain", "aiperf"]) -> Path:
    """The folder these clients are in, installing them first where they are missing."""
    done = subprocess.run([str(INSTALL), which], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AbsentError(f"hack/clients/install {which}: {_last_words(done.stderr)}")
    return Path(done.stdout.strip())


def program(name: str) -> str:
    """The path of one of the Go programs."""
    return str(installed("go") / name)


def system_program(name: str) -> str:
    """The path of a program of the operating system."""
    found = shutil.which(name)
    if found is None:
        raise AbsentError(f"{name} is not installed on this machine")
    return found


def output_of(command: Sequence[str], given: bytes = b"", codes: Sequence[int] = (0,)) -> str:
    """Run a program to its end and return what it printed; raise ProgramError for another exit code."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{Path(command[0]).name} had not ended after {RUN_SECONDS:g} s") from None
    if done.returncode not in codes:
        words = _last_words((done.stderr or done.stdout).decode(errors="replace"))
        raise ProgramError(f"{Path(command[0]).name} ended with exit code {done.returncode}: {words}")
    return done.stdout.decode()


def _last_words(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-4:])[:500] or "it did not say why"
