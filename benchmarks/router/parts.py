"""Parts of the router benchmark: overhead, throughput, large tensors, batching behind a slow model, overload."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from benchmarks.router.clients import Send, direct_client, grpc_client, mlserver_client, rest_client
from benchmarks.router.drive import Tally, closed_loop, open_loop
from benchmarks.router.processes import Served, chained_mlservers, echo_pipeline, served, usage
from trimtab_pipelines.result_line import Threshold, threshold

Figures = dict[str, float]
Targets = dict[str, tuple[Served, Callable[[Served, int], AbstractAsyncContextManager[Send]]]]
"""A running pipeline and a client of it, by name."""
Part = Coroutine[Any, Any, tuple[Figures, list[Threshold]]]

SMALL_NUMBERS = 1024
"""4 KiB of FP32."""
LARGE_NUMBERS = 3 * 224 * 224
"""588 KiB of FP32: one 3×224×224 image."""
BATCH_SIZE = 8
DELAY_SECONDS = 0.010
TURNS, TURN_SECONDS = 4, 2.0
LONG_SLO_SECONDS = 10.0
MLSERVERS = {"mlserver": {}, "mlserver_in_process": {"parallel_workers": 0, "metrics_endpoint": None}}
PROTOCOLS = {"rest": rest_client, "grpc": grpc_client}
CODED = {"ok", "late", "429", "503", "504", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


async def overhead() -> tuple[Figures, list[Threshold]]:
    """A: latency that the router and its proxy add at concurrency 1, without batching, 4 KiB.

    All targets take turns and the least median of each counts, because other load on the machine only ever adds.
    """
    figures: Figures = {}
    pipeline = echo_pipeline(SMALL_NUMBERS, 0.0, LONG_SLO_SECONDS)
    async with served(pipeline, 1, 0.0, proxy=False) as bare, served(pipeline, 1, 0.0) as target:
        targets: Targets = {"direct": (bare, direct_client), "bare_rest": (bare, rest_client)}
        targets |= {name: (target, client) for name, client in PROTOCOLS.items()}
        tallies = await _in_turns(targets, SMALL_NUMBERS, 1)
    figures |= _best(tallies, key=lambda tally: -tally.quantile_ms(0.5))
    figures |= await _mlservers(SMALL_NUMBERS, 1, 4.0)
    router = figures["bare_rest_p50_ms"] - figures["direct_p50_ms"]
    proxy = figures["rest_p50_ms"] - figures["bare_rest_p50_ms"]
    figures |= {"router_added_p50_ms": round(router, 3), "proxy_added_p50_ms": round(proxy, 3)}
    figures["grpc_added_p50_ms"] = round(figures["grpc_p50_ms"] - figures["direct_p50_ms"], 3)
    added = max(figures[f"{name}_p50_ms"] for name in PROTOCOLS) - figures["direct_p50_ms"]
    over_models = round(added / figures["direct_p50_ms"], 3)
    return figures, [
        threshold(
            "a: p50 that the proxy adds over p50 that the router adds, concurrency 1, 4 KiB",
            round(proxy / router, 3),
            "<=",
            0.5,
        ),
        threshold(
            "a: p50 that proxy and router add over the model servers' own (slower protocol)", over_models, "<=", 2.0
        ),
    ]


async def throughput() -> tuple[Figures, list[Threshold]]:
    """B: 4 KiB at concurrency 64, against chained MLServers and against the router without its proxy."""
    pipeline = echo_pipeline(SMALL_NUMBERS, 0.0, LONG_SLO_SECONDS)
    async with (
        served(pipeline, BATCH_SIZE, 0.0, proxy=False) as bare,
        served(pipeline, BATCH_SIZE, 0.0) as target,
    ):
        targets: Targets = {"bare_rest": (bare, rest_client)}
        targets |= {name: (target, client) for name, client in PROTOCOLS.items()}
        tallies = await _in_turns(targets, SMALL_NUMBERS, 64)
    figures = _best(tallies, key=lambda tally: tally.goodput_rps)
    figures |= await _mlservers(SMALL_NUMBERS, 64, 6.0)
    kept = round(figures["rest_rps"] / figures["bare_rest_rps"], 3)
    return figures, [
        threshold("b: rest throughput with the proxy over without, 4 KiB", kept, ">=", 0.75),
        *(
            threshold(f"b: {name} throughput over chained MLServers, 4 KiB", _ratio(figures, name), ">=", 3.0)
            for name in PROTOCOLS
        ),
    ]


async def large_tensors() -> tuple[Figures, list[Threshold]]:
    """C: 588 KiB at concurrency 1 and 16, against chained MLServers."""
    figures: Figures = {}
    async with served(echo_pipeline(LARGE_NUMBERS, 0.0, LONG_SLO_SECONDS), BATCH_SIZE, 0.0) as target:
        for name, client in {"direct": direct_client, **PROTOCOLS}.items():
            async with client(target, LARGE_NUMBERS) as send:
                figures |= (await closed_loop(send, 1, 4.0, _all(target))).figures(f"{name}_alone")
    figures |= await _closed(LARGE_NUMBERS, 16, 6.0)
    slower = max(figures[f"{name}_alone_p50_ms"] for name in PROTOCOLS)
    times = round(slower / figures["direct_alone_p50_ms"], 2)
    bars = [
        threshold("c: p50 at concurrency 1, 588 KiB, over the model servers' own (slower protocol)", times, "<=", 3.0)
    ]
    bars += [
        threshold(f"c: {name} throughput over chained MLServers, 588 KiB", _ratio(figures, name), ">=", 8.0)
        for name in PROTOCOLS
    ]
    return figures, bars


async def batching() -> tuple[Figures, list[Threshold]]:
    """D: a model that takes 10 ms per batch of any size: at most 800 requests per second with batches of 8.

    The machine's own limit is measured first, with full batches in sequence.
    """
    figures: Figures = {}
    bars: list[Threshold] = []
    async with served(echo_pipeline(SMALL_NUMBERS, DELAY_SECONDS, 0.5), BATCH_SIZE, DELAY_SECONDS) as target:
        async with direct_client(target, SMALL_NUMBERS, BATCH_SIZE) as send:
            direct = await closed_loop(send, 1, 6.0, _all(target))
        figures |= direct.figures("direct")
        stages_at_once = len(target.servers)
        model_rps = stages_at_once * BATCH_SIZE / (direct.quantile_ms(0.5) / 1000)
        figures["model_rps"] = round(model_rps, 1)
        for name, client in PROTOCOLS.items():
            async with client(target, SMALL_NUMBERS) as send:
                full = await closed_loop(send, 64, 6.0, _all(target))
                calm = await open_loop(send, 200, 10.0, _all(target), 0.5)
            figures |= full.figures(f"{name}_closed") | calm.figures(f"{name}_open")
            unanswered = calm.codes.total() - calm.codes["ok"]
            bars += [
                threshold(
                    f"d: {name} throughput at concurrency 64 over the model's own",
                    round(full.goodput_rps / model_rps, 3),
                    ">=",
                    0.9,
                ),
                threshold(f"d: {name} not ok at 200 a second", unanswered, "==", 0),
                threshold(
                    f"d: {name} p99 at 200 a second over a batch's own p99",
                    round(calm.quantile_ms(0.99) / direct.quantile_ms(0.99), 2),
                    "<=",
                    2.0,
                ),
            ]
    return figures, bars


async def overload() -> tuple[Figures, list[Threshold]]:
    """E: 30 s at three times the limit of D, and 30 s of 200 large tensors per second."""
    figures: Figures = {}
    bars: list[Threshold] = []
    for case, numbers, delay_seconds, slo_seconds, rate_rps in (
        ("slow", SMALL_NUMBERS, DELAY_SECONDS, 0.5, 2400.0),
        ("large", LARGE_NUMBERS, 0.0, 1.0, 200.0),
    ):
        for name, client in PROTOCOLS.items():
            async with served(echo_pipeline(numbers, delay_seconds, slo_seconds), BATCH_SIZE, delay_seconds) as target:
                async with client(target, numbers) as send:
                    best = await closed_loop(send, 64, 5.0, _all(target))
                    tally = await open_loop(send, rate_rps, 30.0, _all(target), slo_seconds)
                router_bytes = usage((target.router,)).peak_bytes
            most = min(best.goodput_rps, rate_rps)
            key = f"{name}_{case}"
            figures |= best.figures(f"{key}_best") | tally.figures(key) | _codes(key, tally)
            figures[f"{key}_router_peak_mib"] = round(router_bytes / 2**20, 1)
            bars += [
                threshold(f"e: {name} {case} goodput over its own maximum", tally.goodput_rps / most, ">=", 0.9),
                threshold(f"e: {name} {case} responses without a code", _uncoded(tally), "==", 0),
                threshold(f"e: {name} {case} peak memory of all processes, MiB", tally.peak_bytes / 2**20, "<=", 2048),
            ]
    return figures, bars


async def _in_turns(targets: Targets, numbers: int, concurrency: int) -> dict[str, list[Tally]]:
    """Measure all targets in turns, so that a slow period of the machine affects all."""
    tallies: dict[str, list[Tally]] = {name: [] for name in targets}
    for _ in range(TURNS):
        for name, (target, client) in targets.items():
            async with client(target, numbers) as send:
                tallies[name].append(await closed_loop(send, concurrency, TURN_SECONDS, _all(target)))
    return tallies


def _best(tallies: dict[str, list[Tally]], key: Callable[[Tally], float]) -> Figures:
    figures: Figures = {}
    for name, turns in tallies.items():
        figures |= max(turns, key=key).figures(name)
    return figures


async def _closed(numbers: int, concurrency: int, seconds: float) -> Figures:
    """Measure the router over both protocols, and chained MLServers, in one run."""
    figures: Figures = {}
    async with served(echo_pipeline(numbers, 0.0, LONG_SLO_SECONDS), BATCH_SIZE, 0.0) as target:
        for name, client in PROTOCOLS.items():
            async with client(target, numbers) as send:
                figures |= (await closed_loop(send, concurrency, seconds, _all(target))).figures(name)
    return figures | await _mlservers(numbers, concurrency, seconds)


async def _mlservers(numbers: int, concurrency: int, seconds: float) -> Figures:
    """Measure plain MLServers as shipped, which the bars use, and without their worker process."""
    figures: Figures = {}
    for name, settings in MLSERVERS.items():
        async with chained_mlservers(settings) as plain, mlserver_client(plain, numbers) as send:
            figures |= (await closed_loop(send, concurrency, seconds, plain.servers)).figures(name)
    return figures


def _all(target: Served) -> tuple[int, ...]:
    return (*target.fronts, *target.servers)


def _ratio(figures: Figures, name: str) -> float:
    return round(figures[f"{name}_rps"] / figures["mlserver_rps"], 2)


def _codes(key: str, tally: Tally) -> Figures:
    return {f"{key}_code_{code}": count for code, count in sorted(tally.codes.items())}


def _uncoded(tally: Tally) -> int:
    return sum(count for code, count in tally.codes.items() if code not in CODED)
