"""Command line of the benchmarks: `python -m benchmarks NAME [ARGUMENTS]` runs one, without a name it lists them."""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab.app import run_reporting_errors

OUT = Path(os.environ.get("OUT", "out"))
DATA = Path(os.environ.get("DATA", "../shared/data"))
TRACE = os.environ.get("TRACE", "")
RECORDED_LOAD = DATA / "twitter_rps_train.csv.gz"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command that prints its figures and ends with one line of JSON."""

    module: str
    """Of this package; its `main` returns the exit code."""
    summary: str
    arguments: tuple[str, ...] = ()
    single_threaded: bool = False
    """Whether tensor libraries may use one thread only."""


def _paper(name: str, summary: str) -> Benchmark:
    trace = ("--trace", TRACE) if TRACE else ()
    return Benchmark(f"papers.{name}", summary, ("--data", str(DATA), "--out", str(OUT / name), *trace))


_FORECAST = ("--trace", TRACE, "--fit", str(RECORDED_LOAD)) if TRACE else ("--trace", str(RECORDED_LOAD))

BENCHMARKS: Mapping[str, Benchmark] = {
    "router": Benchmark("router.parts", "overhead, throughput, large tensors and batching against chained MLServers"),
    "router-commits": Benchmark("router.commits", "cost of a request against another commit or the least router"),
    "overload": Benchmark("overload.__main__", "goodput at 3 and 10 times capacity, with and without a busy neighbour"),
    "solver": Benchmark("solver", "the exact solver against HiGHS and Gurobi"),
    "schedule": Benchmark("schedule", "time of deadline schedules and scheduling decisions"),
    "simulator": Benchmark("simulator.__main__", "simulated against served latency and drops", ("--out", str(OUT))),
    "forecast": Benchmark("forecast", "every forecaster on the same windows", _FORECAST),
    "operator": Benchmark("operator_scale", "reconciliation of 300 pipelines on a real API server"),
    "engine": Benchmark("engine.__main__", "tokens per second of continuous batching against generate", (), True),
    "chats-routed": Benchmark("chats_routed", "time to first token that the router adds to 50 streams"),
    "placement": Benchmark("papers.placement", "goodput with a colocated and with a disaggregated encoder"),
    "tokens": Benchmark("tokens", "speed-up of vision transformers by merged tokens"),
    "money": Benchmark("money", "cost of a week on five priced flavors against three rivals", ("--data", str(DATA))),
    "melange": Benchmark("melange", "GPUs of two kinds by request size, against Mélange", ("--data", str(DATA))),
    "reproduce-ipa": _paper("ipa", "IPA's five pipelines, workloads and baselines in the simulator"),
    "reproduce-mosel": _paper("mosel", "MOSEL's models and policies in the simulator, or served with --served"),
    "reproduce-otas": _paper("otas", "OTAS's loads, policy and baselines in the simulator, or served with --served"),
    "reproduce-modserve": _paper("modserve", "ModServe's models on 128 and 640 GPUs against a monolith"),
}


def main(arguments: list[str]) -> int:
    """Run the named benchmark in this process, or list all; the exit code is 2 for an unknown name."""
    name, *rest = arguments or [""]
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        if name:
            sys.stderr.write(f"no benchmark {name!r}; there are:\n")
        print("\n".join(f"{name:20}{benchmark.summary}" for name, benchmark in BENCHMARKS.items()))
        return 2 if name else 0
    if benchmark.single_threaded:
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = [f"benchmarks {name}", *benchmark.arguments, *rest]
    return run_reporting_errors(importlib.import_module(f"benchmarks.{benchmark.module}").main)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
