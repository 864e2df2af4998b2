"""Half an hour of load during which plans change: no process grows, and the files of a day stay bounded.

A client looks at the live page all the while. `--minutes` sets another duration.
"""

import json
import statistics
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.figures import Figures
from tests.local_run import Up, command_line, recorded_seconds, up
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(8 * 3600)]

PIPELINE = Path(__file__).parents[2] / "pipelines" / "digits"
RATE_RPS = 20.0
EVERY_SECONDS = 5.0
SETTLED_SHARE, WINDOW_SHARE = 1 / 6, 1 / 30
"""Of the duration: until memory has settled, and of each median."""
MAX_GROWTH = 0.05
DAY_SECONDS = 86_400
MAX_DAY_BYTES = 256 * 2**20
BOUNDS = {"samples.jsonl": 16 * 2**20, "decisions.jsonl": 32 * 2**20}
MAX_LOG_BYTES = 8 * 2**20
"""The bounds of docs/command-line.md."""
NAMES = {
    "trimtab_router.envoy": "envoy supervisor",
    "trimtab_router": "router",
    "trimtab_adapter": "adapter",
    "/envoy": "envoy",
    "fork_server": "model servers",
    " up ": "supervisor",
}


@dataclass(slots=True)
class Memory:
    """Resident memory of one process by the time since it was first seen."""

    name: str
    began: float
    samples: list[tuple[float, int]] = field(default_factory=list)

    def growth(self, seconds: float) -> float | None:
        """Growth after it has settled, as a fraction; None for a process that lived for a small part of the run."""
        settled_at, window, end = SETTLED_SHARE * seconds, WINDOW_SHARE * seconds, self.samples[-1][0]
        settled = [size for at, size in self.samples if settled_at <= at < settled_at + window]
        last = [size for at, size in self.samples if at >= end - window]
        if not settled or end < settled_at + 2 * window:
            return None
        return statistics.median(last) / statistics.median(settled) - 1


def test_nothing_grows_under_changing_plans(tmp_path: Path, request: pytest.FixtureRequest, figures: Figures) -> None:
    seconds = 60.0 * request.config.getoption("--minutes")
    processes: dict[int, Memory] = {}
    sizes: list[tuple[float, dict[str, int]]] = []
    load = f"steps:{','.join([f'{RATE_RPS / 2:g}x60,{1.5 * RATE_RPS:g}x60'] * max(round(seconds / 120), 1))}"
    with up(tmp_path, run_folder=tmp_path / "run", pipeline=PIPELINE) as served:
        command = command_tied_to_parent("trimtab", "loadtest", str(PIPELINE), "--load", load)
        command += ["--duration", f"{seconds:g}", "--address", f"127.0.0.1:{served.rest_port}"]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sending:
            while sending.poll() is None:
                measure_memory(served, processes)
                sizes.append((time.monotonic() - began, file_sizes(served.folder)))
                look_at_page(served)
                time.sleep(EVERY_SECONDS)
            output = sending.stdout.read() if sending.stdout else ""
        decisions = (served.folder / "decisions.jsonl").read_text().splitlines()
        served.stop()

    results = json.loads(output.splitlines()[-1])["figures"]
    changes = len({json.loads(line)["spec"]["generation"] for line in decisions}) - 1
    growth = {
        memory.name: fraction for memory in processes.values() if (fraction := memory.growth(seconds)) is not None
    }
    figures.add(received=results["received"], within_slo_fraction=results["slo_fraction"])
    figures.add(**{f"growth_{name.replace(' ', '_')}": round(fraction, 4) for name, fraction in growth.items()})
    figures.require("failed requests", results["failed"], "==", 0)
    figures.require("plan changes", changes, ">=", 2, depends_on_load=True)
    figures.require("growth of the process that grew most", round(max(growth.values()), 4), "<=", MAX_GROWTH)
    figures.require("size of a day's files, bytes", projected_day_bytes(sizes), "<=", MAX_DAY_BYTES)


def measure_memory(served: Up, processes: dict[int, Memory]) -> None:
    whole, now = psutil.Process(served.process.pid), time.monotonic()
    for process in (whole, *whole.children(recursive=True)):
        words = command_line(process)
        try:
            size = process.memory_info().rss
        except psutil.Error:
            continue
        name = next((name for word, name in NAMES.items() if word in words), words[:40])
        memory = processes.setdefault(process.pid, Memory(name, now))
        memory.samples.append((now - memory.began, size))


def file_sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def look_at_page(served: Up) -> None:
    with urllib.request.urlopen(served.page, timeout=30) as response:  # noqa: S310
        recorded_seconds(response.read().decode())


def projected_day_bytes(sizes: list[tuple[float, dict[str, int]]]) -> int:
    """Size of a day's files, which grow as in the second half of the run up to their bounds."""
    (middle_at, middle), (last_at, last) = sizes[len(sizes) // 2], sizes[-1]
    total = 0.0
    for name, size in last.items():
        rate = max(size - middle.get(name, size), 0) / max(last_at - middle_at, 1e-9)
        bound = BOUNDS.get(name, MAX_LOG_BYTES if name.startswith("logs/") else float("inf"))
        total += min(size + rate * (DAY_SECONDS - last_at), max(bound, size))
    return round(total)


def test_projection_respects_the_bounds_of_files() -> None:
    sizes = [(0.0, {"run.json": 10}), (50.0, {"run.json": 10, "logs/a": 0}), (100.0, {"run.json": 10, "logs/a": 10**7})]

    assert projected_day_bytes(sizes) == 10**7 + 10
