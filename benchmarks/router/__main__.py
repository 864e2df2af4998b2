"""Router benchmark in five parts. The servers run on one core, the client on the other."""

import argparse
import asyncio
import sys
from collections.abc import Callable

from benchmarks.cores import CLIENT_CORE, pin
from benchmarks.router import parts
from trimtab.app import run_reporting_errors
from trimtab_pipelines.result_line import ResultLine, Threshold
from trimtab_protocol import event_loop

PARTS: dict[str, Callable[[], parts.Part]] = {
    "a": parts.overhead,
    "b": parts.throughput,
    "c": parts.large_tensors,
    "d": parts.batching,
    "e": parts.overload,
}


def main() -> int:
    """Run the chosen parts; the exit code is 0 if every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks router", description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="run only this part; may be repeated")
    chosen = parser.parse_args().part or list(PARTS)
    pin(CLIENT_CORE)
    figures: dict[str, float | int | str | None] = {}
    bars: list[Threshold] = []
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        for name in chosen:
            part_figures, part_bars = runner.run(PARTS[name]())
            figures |= {f"{name}_{key}": value for key, value in part_figures.items()}
            bars += part_bars
            for bar in part_bars:
                verdict = "holds" if bar.holds else "MISSED"
                sys.stderr.write(f"{name}  {bar.bar}: {bar.value:g} (bound {bar.bound}) {verdict}\n")
    outcome = ResultLine(name="bench-router", figures=figures, bars=tuple(bars))
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
