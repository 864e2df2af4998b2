"""Cost of a request in this router and in another: `python -m benchmarks router-commits [CHECKOUT]`.

CHECKOUT is a worktree of another commit, whose router runs behind a proxy, as ours does then; without one, the other is
the least router. Both take turns at the same load from the other core, before the same model servers. The figure is the
CPU time of the router's own process per request; the bar is on the median of the ratios of neighbouring turns, beside
that of the requests per second of router, proxy and model servers on one core.
"""

import argparse
import asyncio
import statistics
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness.processors import CLIENT_CORE, pin
from benchmarks.harness.report import Report
from benchmarks.router.clients import closed_loop, grpc_client, rest_client
from benchmarks.router.parts import BATCH_SIZE, LONG_SLO_SECONDS, SMALL_NUMBERS
from benchmarks.router.processes import Served, echo_pipeline, echo_plan, least_router, routed, served
from trimtab_protocol import event_loop

TURN_SECONDS = 2.0
MAX_RATIO, MAX_RATIO_TO_LEAST = 1.02, 1.6
CLIENTS = {"rest": rest_client, "grpc": grpc_client}
LOADS = {f"{name} {callers}": (name, callers) for name in CLIENTS for callers in (1, 8, 64)}


def main() -> int:
    """Compare; the exit code is 0 if every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks router-commits", description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", help="a worktree of the other commit")
    parser.add_argument("--turns", type=int, default=6, help="of each router at each load")
    parser.add_argument("--max-ratio", type=float, help=f"bar (default: {MAX_RATIO}, or {MAX_RATIO_TO_LEAST})")
    options = parser.parse_args()
    pin(CLIENT_CORE)
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        checkout = options.checkout and options.checkout.resolve()
        bound = options.max_ratio or (MAX_RATIO if checkout else MAX_RATIO_TO_LEAST)
        report = runner.run(compare(checkout, options.turns, bound))
    return report.finish()


async def compare(checkout: Path | None, turns: int, bound: float) -> Report:
    pipeline = echo_pipeline(SMALL_NUMBERS, 0.0, LONG_SLO_SECONDS)
    plan = echo_plan(pipeline, BATCH_SIZE, 0.0)
    report = Report("bench-router-commits")
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(served(pipeline, BATCH_SIZE, 0.0, proxy=False))
        ports, other = replicas.data_ports, least_router(replicas.data_ports)
        if checkout is not None:
            other = routed(pipeline, plan, ports, tree=checkout)
        ours = routed(pipeline, plan, ports, proxy=checkout is not None)
        routers = [await stack.enter_async_context(each) for each in (other, ours)]
        for load, (protocol, callers) in LOADS.items():
            if protocol == "grpc" and checkout is None:
                continue
            pairs = [[await _measure(router, protocol, callers) for router in routers] for _ in range(turns)]
            ratio, speedup = (statistics.median(now[i] / before[i] for before, now in pairs) for i in range(2))
            for name, side in zip(("before", "now"), zip(*pairs, strict=True), strict=True):
                microseconds = 1e6 * statistics.median(seconds for seconds, _ in side)
                report.add({f"{load}: {name}, microseconds": round(microseconds, 1)})
            report.add({f"{load}: requests per second, now over before": round(speedup, 3)})
            report.hold(f"{load} in flight: CPU time per request, now over before", ratio, "<=", bound)
            sys.stderr.write(f"{load}: {ratio:.3f}\n")
    return report


async def _measure(router: Served, protocol: str, callers: int) -> tuple[float, float]:
    """Return the CPU seconds per request of the router's own process, and the requests per second."""
    async with CLIENTS[protocol](router, SMALL_NUMBERS) as send:
        tally = await closed_loop(send, callers, TURN_SECONDS, (router.router,), warmup_seconds=0.5)
    if set(tally.codes) != {"ok"}:
        raise RuntimeError(f"not every request succeeded: {dict(tally.codes)}")
    return tally.cpu_seconds / tally.codes["ok"], tally.goodput_rps
