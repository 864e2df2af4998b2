"""`python -m benchmarks.soak`: a pipeline serves for half an hour while its plans change; nothing grows.

Somebody looks at its live page all the while. Each process of `trimtab up` is weighed every few seconds; what it holds
at the end is compared with what it held once it had settled. Every file of the run is measured too, and a day's size
told. The load comes from a process of its own, which keeps a record of every request and is not weighed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from tests.local_run import Up, recorded_seconds, up
from trimtab.app import run_reporting_errors
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.result_line import ResultLine, threshold

EVERY_SECONDS = 5.0
SETTLED_SECONDS = 300.0
WINDOW_SECONDS = 60.0
MOST_GROWTH = 0.05
DAY_SECONDS = 86_400
MOST_DAY_BYTES = 256 * 2**20
"""Samples, decisions and the logs of all processes at their bounds, and what is written once."""


@dataclass(slots=True)
class Weights:
    """What one process held, by the seconds since it was first seen."""

    name: str
    began: float
    seen: list[tuple[float, int]] = field(default_factory=list)

    @property
    def growth(self) -> float | None:
        """How much more it held at its end than once it had settled; None for one that did not live long enough."""
        settled = [size for at, size in self.seen if SETTLED_SECONDS <= at < SETTLED_SECONDS + WINDOW_SECONDS]
        last = [size for at, size in self.seen if at >= self.seen[-1][0] - WINDOW_SECONDS]
        if not settled or self.seen[-1][0] < SETTLED_SECONDS + 2 * WINDOW_SECONDS:
            return None
        return statistics.median(last) / statistics.median(settled) - 1


def main() -> int:
    """Soak it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long (default: %(default)g)")
    parser.add_argument("--rps", type=float, default=20.0, help="requests a second, on average (default: %(default)g)")
    parser.add_argument("--pipeline", type=Path, default=Path("pipelines/digits"))
    return run_reporting_errors(partial(_soak, parser.parse_args()))


def _soak(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="trimtab-soak-") as name:
        outcome = soak(Path(name), given.pipeline, given.seconds, given.rps)
    outcome.print()
    return 0 if outcome.holds else 1


def soak(folder: Path, pipeline: Path, seconds: float, rps: float) -> ResultLine:
    """Serve under a load that goes up and down, so that plans change, and weigh everything."""
    processes: dict[int, Weights] = {}
    sizes: list[tuple[float, dict[str, int]]] = []
    with up(folder, run_folder=folder / "run", pipeline=pipeline) as served:
        cycles = max(round(seconds / 120), 1)
        load = "steps:" + ",".join([f"{rps / 2:g}x60", f"{1.5 * rps:g}x60"] * cycles)
        command = command_tied_to_parent(
            "trimtab", "loadtest", str(pipeline), "--load", load, "--duration", f"{seconds:g}"
        )
        command += ["--address", f"127.0.0.1:{served.rest_port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sending:
            began = time.monotonic()
            try:
                while sending.poll() is None:
                    _weigh(served, processes)
                    sizes.append((time.monotonic() - began, _sizes(served.folder)))
                    _tell(began, seconds, processes, _look(served))
                    time.sleep(EVERY_SECONDS)
            except BaseException:
                sending.kill()
                raise
            output = sending.stdout.read() if sending.stdout else ""
        generations = _changes(served.folder)
        served.stop()
    return _outcome(json.loads(output.splitlines()[-1])["figures"], processes, sizes, generations)


def _weigh(served: Up, processes: dict[int, Weights]) -> None:
    whole = psutil.Process(served.process.pid)
    now = time.monotonic()
    for process in (whole, *whole.children(recursive=True)):
        try:
            size, words = process.memory_info().rss, " ".join(process.cmdline())
        except psutil.Error:
            continue
        known = processes.setdefault(process.pid, Weights(_name(words), now))
        known.seen.append((now - known.began, size))


def _name(words: str) -> str:
    named = {"trimtab_router.envoy": "door", "trimtab_router": "router", "trimtab_adapter": "adapter"}
    named |= {"envoy": "envoy", "forkserver": "model servers", "resource_tracker": "tracker", " up ": "supervisor"}
    return next((name for word, name in named.items() if word in words), words[:40])


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _look(served: Up) -> int:
    """Fetch the live page; return its size in bytes, 0 if nothing is recorded yet."""
    with urllib.request.urlopen(served.page, timeout=30) as response:  # noqa: S310
        page = response.read()
    return len(page) if recorded_seconds(page.decode()) else 0


def _changes(folder: Path) -> int:
    """How many plans were decided one after the other that were not the same."""
    lines = (folder / "decisions.jsonl").read_text().splitlines()
    return len({json.loads(line)["spec"]["generation"] for line in lines}) - 1


def _tell(began: float, seconds: float, processes: dict[int, Weights], looked: int) -> None:
    mebibytes = {w.name: w.seen[-1][1] / 2**20 for w in processes.values() if w.name in {"router", "supervisor"}}
    shown = ", ".join(f"{name} {size:.0f} MiB" for name, size in mebibytes.items())
    sys.stderr.write(f"\r{time.monotonic() - began:.0f}/{seconds:.0f} s: {shown}, page {looked / 1000:.0f} kB   ")
    sys.stderr.flush()


def _outcome(
    load: dict[str, float], processes: dict[int, Weights], sizes: Sequence[tuple[float, dict[str, int]]], changes: int
) -> ResultLine:
    grown: dict[str, float] = defaultdict(lambda: -1.0)
    for weights in processes.values():
        if (growth := weights.growth) is not None:
            grown[weights.name] = max(grown[weights.name], round(growth, 4))
    day = projected_day_bytes(sizes)
    figures: dict[str, float | int | str | None] = {
        "received_requests": load["received"],
        "within_slo_fraction": load["slo_fraction"],
        "plan_changes": changes,
        "processes_weighed": sum(weights.growth is not None for weights in processes.values()),
        **{f"growth_fraction_{name.replace(' ', '_')}": growth for name, growth in grown.items()},
        "files_bytes": sum(sizes[-1][1].values()),
        "projected_day_bytes": day,
    }
    bars = (
        threshold("failed requests", load["failed"], "==", 0),
        threshold("plan changes", changes, ">=", 2),
        threshold("processes weighed", len(grown), ">=", 1),
        threshold(
            "growth of the process that grew most, fraction", max(grown.values(), default=1.0), "<=", MOST_GROWTH
        ),
        threshold("projected size of a day's files, bytes", day, "<=", MOST_DAY_BYTES),
    )
    return ResultLine(name="soak", figures=figures, bars=bars)


def projected_day_bytes(sizes: Sequence[tuple[float, dict[str, int]]]) -> int:
    """What the run's files would hold after a day, growing as in the second half; what is bounded stays so by itself.

    The bounds are those of docs/command-line.md.
    """
    bounds = {"samples.jsonl": 16 * 2**20, "decisions.jsonl": 32 * 2**20}
    (middle_at, middle), (last_at, last) = sizes[len(sizes) // 2], sizes[-1]
    total = 0.0
    for name, size in last.items():
        rate = max(size - middle.get(name, size), 0) / max(last_at - middle_at, 1e-9)
        bound = bounds.get(name, 8 * 2**20 if name.startswith("logs/") else float("inf"))
        total += min(size + rate * (DAY_SECONDS - last_at), max(bound, size))
    return round(total)


if __name__ == "__main__":
    sys.exit(main())
