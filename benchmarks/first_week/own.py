"""Custom model family and samples of docs/develop/bring-your-own-model.md, and the output while they are served."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.clients.tools import AbsentError
from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.faults import asking
from benchmarks.first_week.stranger import PATIENCE_SECONDS, Up, a_pipeline, trimtab, until, up
from benchmarks.live_page import recorded_seconds

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
MOST_START_SECONDS = 0.5


def worked_example(_: Path) -> Seen:
    """Files and commands of the page work as they stand; a test carries them out in an environment of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/docs/test_worked_example.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    require(done.returncode == 0, done.stdout[-2000:])
    return Seen("trained, measured, profiled, planned and served, word for word")


def unknown_family(folder: Path) -> Seen:
    """A family that is not there is told before anything starts or is fetched."""
    path = a_pipeline(folder)
    path.write_text(re.sub(r"family: echo", "family: acme.models:Reader", path.read_text(), count=1))
    done = trimtab("up", str(path))
    require(done.code == 2 and "no module 'acme' here" in done.errors, f"exit code {done.code}: {done.errors}")
    return Seen(done.errors.strip())


def accuracy_of_samples(folder: Path) -> Seen:
    """Every variant is measured on the samples, and the pipeline's file says so."""
    path = a_pipeline(folder)
    lines = [{"inputs": {"x": [1.0] * 4}, "outputs": {"y": [3.0 + (n < 2)] * 4}} for n in range(20)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = trimtab("evaluate", str(path), "--samples", str(folder / "samples.jsonl"))
    require(done.code == 0, done.errors + done.output)
    require("source: Measured, samples: 20" in path.read_text(), path.read_text())
    shown = trimtab("plan", str(path), "--load", "5")
    require("measured (n 20" in shown.output, shown.output + shown.errors)
    return Seen("18 of 20 right, written with n, interval and digest")


def live_page(folder: Path) -> Seen:
    """The page grows while requests come, in a real browser; Ctrl-C leaves the finished one."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise AbsentError(f"no browser: {', '.join(BROWSERS)}")
    with up(folder) as served:
        with asking(served):
            until(lambda: _shown_seconds(served) >= 5, "five seconds are shown")
            options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
            command = [browser, *options, "--virtual-time-budget=6000", "--dump-dom", served.page]
            seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
            before = _shown_seconds(served)
            until(lambda: _shown_seconds(served) > before, "the page grows")
        done = served.stop()
    require(seen.count("js-plotly-plot") >= 6 and 'data-state="live"' in seen, seen[-500:])
    require(done.code == 0 and (served.folder / "echo.html").exists(), f"{done.code}: {done.output[-300:]}")
    return Seen("drawn, grown, and left as echo.html")


def _shown_seconds(served: Up) -> int:
    try:
        with urllib.request.urlopen(served.page, timeout=30) as response:  # noqa: S310
            return recorded_seconds(response.read().decode())
    except OSError:
        return -1


def a_quick_start(folder: Path) -> Seen:
    """`trimtab --version` is there at once; the best of five, since others use this machine too."""
    del folder
    spent = []
    for _ in range(5):
        began = time.monotonic()
        require(trimtab("--version").code == 0, "no version")
        spent.append(time.monotonic() - began)
    require(min(spent) < MOST_START_SECONDS, f"{min(spent):.2f} s")
    return Seen("started", {"start_seconds": round(min(spent), 3)})


def facts_as_json(folder: Path) -> Seen:
    """What prints facts prints them as JSON too: status of a running router, plan, explain."""
    with up(folder) as served:
        told = trimtab("status", "--address", f"127.0.0.1:{served.admin_port}", "--json")
        path = str(folder / "pipeline.yaml")
        plan, why = (trimtab(verb, path, "--load", "5", "--json") for verb in ("plan", "explain"))
    facts = json.loads(told.output)
    require({"pipeline", "plan_generation", "plan_applied_at", "drops"} <= facts.keys(), told.output)
    for done in (plan, why):
        require(json.loads(done.output)["plan"]["spec"]["feasible"], done.output + done.errors)
    return Seen("status, plan and explain")


def clients(_: Path) -> Seen:
    """Clients that nobody here wrote; those that are not installed are skipped by name."""
    command = [sys.executable, "-m", "benchmarks.clients"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20 * PATIENCE_SECONDS)
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    require(done.returncode == 0, str({name: told for name, told in figures.items() if str(told).startswith("failed")}))
    skipped = [name for name, told in figures.items() if str(told).startswith("skipped")]
    words = f"{figures['clients_ok']} served, skipped: {', '.join(skipped) or 'none'}"
    return Seen(words, {name: figures[name] for name in ("clients_ok", "clients_failed", "clients_skipped")})


def nothing_in_the_way(folder: Path) -> Seen:
    """Files of the stranger's that are called as modules of Python's do not stop a run in their folder."""
    for name in ("grp", "queue", "types_of_mine", "select"):
        (folder / f"{name}.py").write_text("raise RuntimeError('mine')\n")
    before, was = Path.cwd(), set(folder.iterdir())
    os.chdir(folder)
    try:
        os.environ["PYTHONSAFEPATH"] = "1"  # as the installed command starts: without the working directory
        with up(folder / "p") as served:
            require(served.ask()[0] == 200, "not served")
    finally:
        os.environ.pop("PYTHONSAFEPATH", None)
        os.chdir(before)
    left = {path.name for path in folder.iterdir()} - {path.name for path in was} - {"p"}
    require(not left, f"written into the working directory: {left}")
    return Seen("served, nothing written there")


CHECKS = (
    Check("own models", "the worked example works word for word", worked_example),
    Check("own models", "a family that is not there is told first", unknown_family),
    Check("own samples", "accuracies are measured and written", accuracy_of_samples),
    Check("live page", "the page grows in a browser", live_page),
    Check("command line", "it starts at once", a_quick_start),
    Check("command line", "facts are told as JSON", facts_as_json),
    Check("command line", "a stranger's files are in nobody's way", nothing_in_the_way),
    Check("clients", "clients that nobody here wrote are served", clients),
)
