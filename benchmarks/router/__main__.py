"""Router benchmark in five parts. The servers run on one core, the client on the other."""

import argparse
import asyncio

from benchmarks.harness.processors import CLIENT_CORE, pin
from benchmarks.harness.report import Report
from benchmarks.router import parts
from trimtab_protocol import event_loop

PARTS = {
    "a": parts.overhead,
    "b": parts.throughput,
    "c": parts.large_tensors,
    "d": parts.batching,
    "e": parts.overload,
}


def main() -> int:
    """Run the chosen parts; the exit code is 0 if every bar holds."""
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
