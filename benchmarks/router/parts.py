"""Router benchmark: overhead, throughput, large tensors, and batching behind a slow model."""

import argparse
import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from benchmarks.harness.processors import CLIENT_CORE, pin
from benchmarks.harness.report import Report
from benchmarks.router.clients import (
    Send,
    Tally,
    closed_loop,
    direct_client,
    grpc_client,
    mlserver_client,
    open_loop,
    rest_client,
)
from benchmarks.router.processes import Served, chained_mlservers, echo_pipeline, served
from trimtab_protocol import event_loop

Figures = dict[str, float]
Connect = Callable[[Served, int], AbstractAsyncContextManager[Send]]
"""Opens a client that sends rows of so many numbers."""

SMALL_NUMBERS = 1024
"""4 KiB of FP32."""
LARGE_NUMBERS = 3 * 224 * 224
"""588 KiB of FP32: one 3×224×224 image."""
BATCH_SIZE = 8
DELAY_SECONDS = 0.010
TURNS, TURN_SECONDS = 4, 2.0
LONG_SLO_SECONDS = 10.0
MLSERVERS = {"mlserver": {}, "mlserver_in_process": {"parallel_workers": 0, "metrics_endpoint": None}}
PROTOCOLS: Mapping[str, Connect] = {"rest": rest_client, "grpc": grpc_client}


async def overhead(report: Report) -> None:
    """A: latency that the router and its proxy add at concurrency 1, without batching, 4 KiB.

    All targets take turns and the least median of each counts, because other load on the machine only ever adds.
    """
    figures = await _take_turns(1, 1, lambda tally: -tally.quantile_ms(0.5)) | await _mlservers(SMALL_NUMBERS, 1, 4.0)
    router = figures["bare_rest_p50_ms"] - figures["direct_p50_ms"]
    proxy = figures["rest_p50_ms"] - figures["bare_rest_p50_ms"]
    figures |= {"router_added_p50_ms": round(router, 3), "proxy_added_p50_ms": round(proxy, 3)}
    figures["grpc_added_p50_ms"] = round(figures["grpc_p50_ms"] - figures["direct_p50_ms"], 3)
    report.add(figures)
    added = max(figures[f"{name}_p50_ms"] for name in PROTOCOLS) - figures["direct_p50_ms"]
    name = "a: p50 that the proxy adds over p50 that the router adds, concurrency 1, 4 KiB"
    report.hold(name, round(proxy / router, 3), "<=", 0.5)
    name = "a: p50 that proxy and router add over the model servers' own (slower protocol)"
    report.hold(name, round(added / figures["direct_p50_ms"], 3), "<=", 2.0)


async def throughput(report: Report) -> None:
    """B: 4 KiB at concurrency 64, against chained MLServers and against the router without its proxy."""
    figures = await _take_turns(BATCH_SIZE, 64, lambda tally: tally.goodput_rps)
    figures |= await _mlservers(SMALL_NUMBERS, 64, 6.0)
    report.add(figures)
    kept = round(figures["rest_rps"] / figures["bare_rest_rps"], 3)
    report.hold("b: rest throughput with the proxy over without, 4 KiB", kept, ">=", 0.75)
    for name in PROTOCOLS:
        report.hold(f"b: {name} throughput over chained MLServers, 4 KiB", _over_mlserver(figures, name), ">=", 3.0)


async def large_tensors(report: Report) -> None:
    """C: 588 KiB at concurrency 1 and 16, against chained MLServers."""
    figures: Figures = {}
    async with served(echo_pipeline(LARGE_NUMBERS, 0.0, LONG_SLO_SECONDS), BATCH_SIZE, 0.0) as target:
        for name, connect in {"direct": direct_client, **PROTOCOLS}.items():
            figures |= (await _closed(target, connect, LARGE_NUMBERS, 1, 4.0)).figures(f"{name}_alone")
        for name, connect in PROTOCOLS.items():
            figures |= (await _closed(target, connect, LARGE_NUMBERS, 16, 6.0)).figures(name)
    figures |= await _mlservers(LARGE_NUMBERS, 16, 6.0)
    report.add(figures)
    slower = max(figures[f"{name}_alone_p50_ms"] for name in PROTOCOLS)
    times = round(slower / figures["direct_alone_p50_ms"], 2)
    report.hold("c: p50 at concurrency 1, 588 KiB, over the model servers' own (slower protocol)", times, "<=", 3.0)
    for name in PROTOCOLS:
        report.hold(f"c: {name} throughput over chained MLServers, 588 KiB", _over_mlserver(figures, name), ">=", 8.0)


async def batching(report: Report) -> None:
    """D: a model that takes 10 ms per batch of any size: at most 800 requests per second with batches of 8.

    The machine's own limit is measured first, with full batches in sequence.
    """
    async with served(echo_pipeline(SMALL_NUMBERS, DELAY_SECONDS, 0.5), BATCH_SIZE, DELAY_SECONDS) as target:
        async with direct_client(target, SMALL_NUMBERS, BATCH_SIZE) as send:
            direct = await closed_loop(send, 1, 6.0, target.processes)
        stages_at_once = len(target.servers)
        model_rps = stages_at_once * BATCH_SIZE / (direct.quantile_ms(0.5) / 1000)
        report.add(direct.figures("direct") | {"model_rps": round(model_rps, 1)})
        for name, connect in PROTOCOLS.items():
            async with connect(target, SMALL_NUMBERS) as send:
                full = await closed_loop(send, 64, 6.0, target.processes)
                calm = await open_loop(send, 200, 10.0, target.processes, 0.5)
            report.add(full.figures(f"{name}_closed") | calm.figures(f"{name}_open"))
            of_model = round(full.goodput_rps / model_rps, 3)
            over_batch = round(calm.quantile_ms(0.99) / direct.quantile_ms(0.99), 2)
            report.hold(f"d: {name} throughput at concurrency 64 over the model's own", of_model, ">=", 0.9)
            report.hold(f"d: {name} not ok at 200 a second", calm.codes.total() - calm.codes["ok"], "==", 0)
            report.hold(f"d: {name} p99 at 200 a second over a batch's own p99", over_batch, "<=", 2.0)


async def _take_turns(batch_size: int, concurrency: int, key: Callable[[Tally], float]) -> Figures:
    """Measure the router with and without its proxy, and the model servers, in turns; the best turn of each counts.

    A slow period of the machine then affects all.
    """
    pipeline = echo_pipeline(SMALL_NUMBERS, 0.0, LONG_SLO_SECONDS)
    async with served(pipeline, batch_size, 0.0, proxy=False) as bare, served(pipeline, batch_size, 0.0) as target:
        targets: Mapping[str, tuple[Served, Connect]] = {
            "direct": (bare, direct_client),
            "bare_rest": (bare, rest_client),
            **{name: (target, connect) for name, connect in PROTOCOLS.items()},
        }
        tallies: dict[str, list[Tally]] = {name: [] for name in targets}
        for _ in range(TURNS):
            for name, (side, connect) in targets.items():
                tallies[name].append(await _closed(side, connect, SMALL_NUMBERS, concurrency, TURN_SECONDS))
    figures: Figures = {}
    for name, turns in tallies.items():
        figures |= max(turns, key=key).figures(name)
    return figures


async def _closed(target: Served, connect: Connect, numbers: int, concurrency: int, seconds: float) -> Tally:
    async with connect(target, numbers) as send:
        return await closed_loop(send, concurrency, seconds, target.processes)


async def _mlservers(numbers: int, concurrency: int, seconds: float) -> Figures:
    """Measure plain MLServers as shipped, which the bars use, and without their worker process."""
    figures: Figures = {}
    for name, settings in MLSERVERS.items():
        async with chained_mlservers(settings) as plain, mlserver_client(plain, numbers) as send:
            figures |= (await closed_loop(send, concurrency, seconds, plain.servers)).figures(name)
    return figures


def _over_mlserver(figures: Figures, name: str) -> float:
    return round(figures[f"{name}_rps"] / figures["mlserver_rps"], 2)


PARTS = {"a": overhead, "b": throughput, "c": large_tensors, "d": batching}


def main() -> int:
    """Run the chosen parts, the servers on one core and the client on the other; 0 if every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks router", description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="run only this part; may be repeated")
    chosen = parser.parse_args().part or list(PARTS)
    pin(CLIENT_CORE)
    report = Report("bench-router")
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        for name in chosen:
            part = Report(name)
            runner.run(PARTS[name](part))
            report.add({f"{name}_{key}": value for key, value in part.figures.items()})
            report.bars += part.bars
    return report.finish()
