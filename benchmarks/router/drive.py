"""Closed and open load loops over a client, and their tallies."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.router.clients import Send
from benchmarks.router.processes import usage


@dataclass(slots=True)
class Tally:
    """Codes, latencies of successful responses, and resource usage of the watched processes."""

    wall_seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    ok_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def goodput_rps(self) -> float:
        return self.codes["ok"] / self.wall_seconds

    def quantile_ms(self, quantile: float) -> float:
        ordered = sorted(self.ok_seconds)
        return 1000 * ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else float("nan")

    def figures(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}_rps": round(self.goodput_rps, 1),
            f"{prefix}_p50_ms": round(self.quantile_ms(0.5), 3),
            f"{prefix}_p99_ms": round(self.quantile_ms(0.99), 3),
            f"{prefix}_cpu_seconds_per_1000": round(1000 * self.cpu_seconds / max(self.codes["ok"], 1), 3),
            f"{prefix}_peak_mib": round(self.peak_bytes / 2**20, 1),
        }


async def closed_loop(
    send: Send, concurrency: int, seconds: float, watched: tuple[int, ...], warmup_seconds: float = 1.0
) -> Tally:
    """Run callers that each send the next request after a response; responses after the warm-up count."""
    tally = Tally(wall_seconds=seconds)
    begin = time.monotonic() + warmup_seconds
    end = begin + seconds

    async def caller() -> None:
        while (sent := time.monotonic()) < end:
            code = await send()
            if begin <= time.monotonic() < end:
                _count(tally, code, sent)

    async def measure() -> None:
        await asyncio.sleep(warmup_seconds)
        before = usage(watched).cpu_seconds
        await asyncio.sleep(seconds)
        after = usage(watched)
        tally.cpu_seconds, tally.peak_bytes = after.cpu_seconds - before, after.peak_bytes

    await asyncio.gather(measure(), *(caller() for _ in range(concurrency)))
    return tally


async def open_loop(send: Send, rate_rps: float, seconds: float, watched: tuple[int, ...], slo_seconds: float) -> Tally:
    """Send Poisson arrivals at a rate; a response later than the SLO counts as `late`."""
    tally = Tally(wall_seconds=seconds)
    draw = random.Random(0)  # noqa: S311 - arrivals, not secrets
    before = usage(watched).cpu_seconds
    in_flight: set[asyncio.Task[None]] = set()

    async def send_one(due: float) -> None:
        code = await send()
        late = code == "ok" and time.monotonic() - due > slo_seconds
        _count(tally, "late" if late else code, due)

    due = begin = time.monotonic()
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(send_one(due))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        due += draw.expovariate(rate_rps)
    await asyncio.gather(*in_flight)
    after = usage(watched)
    tally.cpu_seconds, tally.peak_bytes = after.cpu_seconds - before, after.peak_bytes
    return tally


def _count(tally: Tally, code: str, sent: float) -> None:
    tally.codes[code] += 1
    if code == "ok":
        tally.ok_seconds.append(time.monotonic() - sent)
