"""How fast the machine is while it serves: a small piece of work, the same each time, on every processor.

A machine that shares its host is not equally fast at all times, and nothing in the pipeline's records says why a batch
took long. So a process a processor multiplies two small matrices some 25 times a second, about 1 % of the processor's
time, and notes how much processor time that took; and where the host took the processor away meanwhile, for how long.
What is served has no part in it. With it the simulator can be told what the machine did, as it is told the arrivals.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.simulator.pace import Readings

SIDE, PERIOD_SECONDS = 192, 0.04
_TICK_SECONDS = 0.01
_STEAL_COLUMN = 8


def probe(processor: int, out: Path) -> None:
    """Take readings on one processor until ended."""
    os.sched_setaffinity(0, {processor})
    left = np.random.default_rng(0).random((SIDE, SIDE), dtype=np.float32)
    right, product = left.T.copy(), np.empty_like(left)
    with out.open("w", buffering=1, encoding="ascii") as file:
        stolen = _stolen_seconds(processor)
        while True:
            time.sleep(PERIOD_SECONDS)
            began = time.thread_time()
            np.matmul(left, right, out=product)
            took = time.thread_time() - began
            before, stolen = stolen, _stolen_seconds(processor)
            file.write(f"{time.time():.6f} {took:.7f} {stolen - before:.3f}\n")


def _stolen_seconds(processor: int) -> float:
    """The seconds the host took this processor away since the start."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"cpu{processor} "))
    return int(line.split()[_STEAL_COLUMN]) * _TICK_SECONDS


@contextmanager
def probing(folder: Path) -> Iterator[list[Path]]:
    """Probe every processor meanwhile; yields the files of the readings. None where processors cannot be chosen."""
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"processor-{processor}.txt" for processor in processors]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.simulator.probe", str(processor), str(file)], env=alone)
        for processor, file in zip(processors, files, strict=True)
    ]
    try:
        yield files
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def read(files: Sequence[Path]) -> list[Readings]:
    """Read what was noted; the last line may be half written."""
    return [np.array([line.split() for line in file.read_text().splitlines()[:-1]], dtype=float) for file in files]


if __name__ == "__main__":
    probe(int(sys.argv[1]), Path(sys.argv[2]))
