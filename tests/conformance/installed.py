"""Third-party programs, installed as hack/clients pins them; a test skips if one cannot be installed."""

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.conformance.target import PATIENCE_SECONDS, Target

INSTALL = Path(__file__).parents[2] / "hack" / "clients" / "install"
PROGRAMS = Path(__file__).parent / "programs"
RUN_SECONDS = 120.0
Environment = Literal["go", "node", "kserve", "openai", "langchain", "aiperf", "transformers"]


@functools.cache
def install(environment: Environment) -> Path:
    """The folder of these clients; those that are missing are installed."""
    done = subprocess.run([str(INSTALL), environment], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"hack/clients/install {environment}: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.strip())


def go_program(name: str) -> str:
    return str(install("go") / name)


def system_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed on this machine")
    return path


def run(
    command: Sequence[str | Path],
    stdin: bytes = b"",
    codes: Sequence[int] = (0,),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end and return its output."""
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=RUN_SECONDS, env=environment)
    assert done.returncode in codes, f"exit code {done.returncode}: {(done.stderr or done.stdout).decode()[-3000:]}"
    return done.stdout.decode()


def run_script(name: str, environment: Environment, target: Target, **more: object) -> dict[str, Any]:
    """Run a script of ours in a client's own environment: it reads one JSON object and prints another."""
    program = [system_program("node")] if environment == "node" else [install(environment) / "bin" / "python"]
    order = {
        "base_url": target.base_url,
        "address": target.grpc,
        "model": target.model,
        "key": target.key,
        "ca": str(target.ca) if target.ca else None,
        "headers": dict(target.headers),
        "timeout_seconds": PATIENCE_SECONDS,
        **more,
    }
    output = run([*program, PROGRAMS / name], json.dumps(order).encode())
    response: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return response
