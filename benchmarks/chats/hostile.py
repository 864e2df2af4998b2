"""``make bench NAME=hostile-chats``: what hostile chats are answered with, and what they cost a router, each by itself.

A real router with a small model behind it, as `trimtab up` runs them: with Envoy in front, and without, where it has to
help itself. Each kind is sent some times; memory is the most the router had beyond what it had just before, time is
processor time of all its threads.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from rich.progress import Progress
from rich.table import Table

from benchmarks.chats.attacks import FETCHED, MEBIBYTE, READ, SHOWN, SPELLED, Attack, Ground, a_small_png, chat
from benchmarks.chats.grounds import serving, store
from benchmarks.hostile.course import forget_peaks, peak_bytes
from benchmarks.hostile.door import Door
from benchmarks.hostile.wire import connected, head, post, status_of
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

CHAT: Final = "/v1/chat/completions"
PATIENCE_SECONDS: Final = 20.0
GIGABYTE: Final = 10**9
JSON: Final = "Content-Type: application/json"
LENGTHS: Final = {
    "a body of a gigabyte": (f"Content-Length: {GIGABYTE}", lambda piece: piece),
    "a gigabyte in chunks": ("Transfer-Encoding: chunked", lambda piece: b"%x\r\n%s\r\n" % (len(piece), piece)),
}
Pieces = Callable[[Ground], Iterable[bytes]]


@dataclass(slots=True)
class Cost:
    """What one kind was answered with, and cost the router, time by time."""

    wanted: str
    met: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    more_bytes: list[int] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether it was answered as it should be, each time."""
        return self.met == {self.wanted}

    @property
    def milliseconds(self) -> float:
        """Processor time of one, the median."""
        return round(1e3 * statistics.median(self.seconds), 1)

    @property
    def mebibytes(self) -> float:
        """The most of all times."""
        return round(max(self.more_bytes) / MEBIBYTE, 1)


def kinds() -> dict[str, tuple[Pieces, str]]:
    """What is sent, and what it should be answered with, by name."""
    found: dict[str, tuple[Pieces, str]] = {}
    for attack in (*READ, *FETCHED, *SHOWN):
        found[attack.name] = (lambda ground, one=attack: [post(CHAT, one.body(ground), JSON)], _wanted(attack))  # type: ignore[misc]
    for name, (length, framed) in LENGTHS.items():
        found[name] = (lambda _, length=length, framed=framed: _endless(length, framed), "413 request_too_large")  # type: ignore[misc]
    return found


def _wanted(attack: Attack) -> str:
    return f"{attack.status} {attack.code or ''}".strip()


def _endless(length: str, framed: Callable[[bytes], bytes]) -> Iterator[bytes]:
    yield head("POST", CHAT, JSON, length)
    for _ in range(GIGABYTE // MEBIBYTE):
        yield framed(bytes(MEBIBYTE))


async def answer_to(port: int, pieces: Iterable[bytes]) -> tuple[str, dict[str, Any]]:
    """Send pieces while listening; the status and what came, `cut` or `nothing` where nothing did."""
    async with connected(port) as wire:
        for piece in pieces:
            if wire.received or not await wire.send(piece, PATIENCE_SECONDS):
                break
        await wire.until(lambda: _told(wire.received) is not None, PATIENCE_SECONDS)
        told = _told(wire.received)
        return (
            (status_of(bytes(wire.received)), told) if told is not None else ("cut" if wire.closed else "nothing", {})
        )


def _told(received: bytearray) -> dict[str, Any] | None:
    """The JSON of an answer, once all of it has come."""
    begin, end = received.find(b"{", received.find(b"\r\n\r\n")), received.rfind(b"}")
    try:
        told: dict[str, Any] = json.loads(received[begin : end + 1])
    except ValueError:
        return None
    return told


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's threads, to the nanosecond."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def attacked(door: Door, pieces: Iterable[bytes], cost: Cost) -> None:
    """Attack once, and note what came of it."""
    pid = door.processes()["router"]
    forget_peaks({"router": pid})
    before, began = psutil.Process(pid).memory_info().rss, cpu_seconds(pid)
    status, told = await answer_to(door.rest, pieces)
    cost.seconds.append(cpu_seconds(pid) - began)
    cost.more_bytes.append(peak_bytes(pid) - before)
    error = told.get("error", {})
    code = error.get("code") if isinstance(error, dict) else "in no form of OpenAI's"
    cost.met.add(f"{status} {code or ''}".strip())


async def course(door: Door, ground: Ground, times: int, advance: Callable[[], None]) -> dict[str, Cost]:
    """Attack with every kind in turn."""
    costs = {}
    for name, (pieces, wanted) in kinds().items():
        cost = costs[name] = Cost(wanted)
        for _ in range(times):
            await attacked(door, pieces(ground), cost)
        advance()
    return costs


async def image_tokens(door: Door, text: str, *images: bytes) -> int:
    """Tokens of images that a chat is told to have."""
    _, told = await answer_to(door.rest, [post(CHAT, chat(Ground(door.local.pipeline.name), text, images), JSON)])
    return int(told["usage"]["prompt_tokens_details"]["image_tokens"])


async def measure(times: int) -> ResultLine:
    """Attack a router that is alone, and one behind Envoy."""
    figures: dict[str, float | int | str | None] = {"kinds": len(kinds()), "times": times}
    bars: list[Threshold] = []
    with Progress(console=console, transient=True) as progress:
        for manner, fronted in (("alone", False), ("behind Envoy", True)):
            task = progress.add_task(f"a router {manner}", total=len(kinds()))
            async with store() as (address, astray), serving(address, fronted=fronted) as door:
                before = door.processes()
                shown = await image_tokens(door, "see", a_small_png())
                costs = await course(
                    door, Ground(door.local.pipeline.name, address), times, partial(progress.advance, task)
                )
                beyond = await image_tokens(door, SPELLED, a_small_png()) - shown
                ended = len(door.local.faults) + (door.processes() != before)
            progress.console.print(_table(manner, costs))
            figures |= _figures(manner, costs)
            bars += [
                *_bars(manner, costs),
                threshold(f"{manner}: image tokens of placeholders that text spells", beyond, "==", 0),
                threshold(f"{manner}: addresses reached that should not be", len(astray), "==", 0),
                threshold(f"{manner}: processes that ended", ended, "==", 0),
            ]
    return ResultLine(name="hostile-chats", figures=figures, bars=tuple(bars))


def _bars(manner: str, costs: Mapping[str, Cost]) -> list[Threshold]:
    return [
        threshold(f"{manner}: kinds answered otherwise", sum(not cost.right for cost in costs.values()), "==", 0),
        threshold(f"{manner}: most memory more, MiB", max(cost.mebibytes for cost in costs.values()), "<=", 64),
        threshold(f"{manner}: most processor time, ms", max(cost.milliseconds for cost in costs.values()), "<=", 50),
    ]


def _figures(manner: str, costs: Mapping[str, Cost]) -> dict[str, str]:
    return {
        f"{manner}: {name}": f"{', '.join(sorted(cost.met))}; {cost.mebibytes} MiB; {cost.milliseconds} ms"
        for name, cost in costs.items()
    }


def _table(manner: str, costs: Mapping[str, Cost]) -> Table:
    page = Table(title=f"a router {manner}")
    for column in ("kind", "met", "MiB more", "ms", "longest ms"):
        page.add_column(column, justify="left" if column in {"kind", "met"} else "right", overflow="fold")
    for name, cost in costs.items():
        met = ", ".join(sorted(cost.met))
        told = met if cost.right else f"[red]{met}[/red] (right: {cost.wanted})"
        page.add_row(name, told, f"{cost.mebibytes}", f"{cost.milliseconds}", f"{1e3 * max(cost.seconds):.1f}")
    return page


def main() -> int:
    """Attack, and print the verdict."""
    parser = argparse.ArgumentParser(description="What hostile chats are answered with, and what they cost a router.")
    parser.add_argument("--times", type=int, default=5, help="each kind is sent so often (default 5)")
    outcome = asyncio.run(measure(parser.parse_args().times))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
