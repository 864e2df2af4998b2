"""Runs the kinds one after the other beside the friendly process, with calm between."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hostile.door import HEALTH, Door
from benchmarks.hostile.kinds import CUT, Kind, Verdict, judge
from benchmarks.hostile.phases import CALM, FRIENDLY_RPS, Phase
from benchmarks.hostile.wire import ask, head
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

WARM_UP_SECONDS = 4.0
CALM_SECONDS = 1.0
LEAST_SECONDS = 1.2
"""A kind that is over sooner leaves the rest to what it began."""
MOST_SECONDS = 150.0
SETTLED_SECONDS, SETTLE_WITHIN_SECONDS = 0.1, 20.0
HOSTILE_NICENESS = 10
"""Callers elsewhere take none of the processor time of those they call."""


@dataclass(slots=True)
class Course:
    """What happened, kind by kind."""

    phases: list[Phase] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def friends(door: Door, log: Path) -> AsyncIterator[None]:
    """Friendly callers as long as the context lasts."""
    router = str(door.processes()["router"])
    others = {*door.processes().values(), *door.local.replica_manager.pids.values()} - {int(router)}
    where = ["--rest-port", str(door.rest), "--grpc-port", str(door.grpc), "--admin", door.admin, "--router", router]
    where += [part for pid in others for part in ("--part", str(pid))]
    process = await asyncio.create_subprocess_exec(
        *command_tied_to_parent("benchmarks.hostile.friendly", *where, "--out", str(log), "--rps", str(FRIENDLY_RPS))
    )
    try:
        await asyncio.sleep(WARM_UP_SECONDS)
        yield
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def run(door: Door, kinds: Iterable[Kind], tell: Callable[[Kind, Verdict], None]) -> Course:
    """Run each kind between two calm phases."""
    os.setpriority(os.PRIO_PROCESS, 0, HOSTILE_NICENESS)
    course = Course()
    await _calm(course)
    for kind in kinds:
        before = door.processes()
        forget_peaks(before)
        began = time.monotonic()
        course.verdicts[kind.name] = await _met(door, kind)
        await asyncio.sleep(max(began + LEAST_SECONDS - time.monotonic(), 0.0))
        await settle(door)
        course.phases.append(Phase(kind.name, began, time.monotonic()))
        after = door.processes()
        course.peak_bytes[kind.name] = {name: peak_bytes(pid) for name, pid in after.items()}
        gone = [name for name, pid in before.items() if after.get(name) != pid]
        if gone:
            course.replaced[kind.name] = ", ".join(gone)
        tell(kind, course.verdicts[kind.name])
        await _calm(course)
    return course


async def _calm(course: Course) -> None:
    began = time.monotonic()
    await asyncio.sleep(CALM_SECONDS)
    course.phases.append(Phase(CALM, began, time.monotonic()))


async def _met(door: Door, kind: Kind) -> Verdict:
    """What a kind met; a connection refused or reset under its hands is one that was cut."""
    try:
        seen = list(await asyncio.wait_for(kind.act(door), MOST_SECONDS))
    except TimeoutError:
        seen = [f"not over within {MOST_SECONDS:g} s"]
    except OSError:
        seen = [CUT]
    return judge(kind.right, seen)


async def settle(door: Door) -> None:
    """Wait until the router answers promptly again, twice in a row."""
    give_up, prompt = time.monotonic() + SETTLE_WITHIN_SECONDS, 0
    port = int(door.admin.rpartition(":")[2])
    while prompt < 2 and time.monotonic() < give_up:
        asked = time.monotonic()
        with suppress(OSError):
            status = await ask(port, head("GET", HEALTH, "Connection: close"), patience_seconds=1.0)
            prompt = prompt + 1 if status == "200" and time.monotonic() - asked < SETTLED_SECONDS else 0
        await asyncio.sleep(0.05)


def peak_bytes(pid: int) -> int:
    """The most memory a process has had at once since its peak was last forgotten."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
    return 0


def forget_peaks(processes: dict[str, int]) -> None:
    """Begin to measure peaks anew."""
    for pid in processes.values():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
