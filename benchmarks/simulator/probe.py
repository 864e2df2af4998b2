"""Probe of machine speed while serving: a small, constant computation on every processor.

A machine that shares its host is not equally fast at all times, and nothing in the pipeline's records says why a batch
took long. So a process a processor multiplies two small matrices some 25 times a second, about 1 % of the processor's
time, and notes how much processor time that took; and where the host took the processor away meanwhile, for how long.
What is served has no part in it. With it the simulator can be told what the machine did, as it is told the arrivals.
One more process notes each second how long the processors computed for anybody else.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.cores import usable
from benchmarks.simulator.pace import Floats, Readings
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

SIDE, PERIOD_SECONDS = 192, 0.04
WATCH_SECONDS = 1.0
OTHERS = "others"
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


def watch(root: int, out: Path) -> None:
    """Note until ended what processors computed for others than a process and all that it started."""
    with out.open("w", buffering=1, encoding="ascii") as file:
        before = _others_seconds(root)
        while True:
            time.sleep(WATCH_SECONDS)
            now = _others_seconds(root)
            file.write(f"{time.time():.6f} {now - before:.3f}\n")
            before = now


def _others_seconds(root: int) -> float:
    """Processor seconds of others so far."""
    every = psutil.cpu_times()
    busy = every.user + every.nice + every.system + every.irq + every.softirq
    ours = (sum(process.cpu_times()[:4]) for process in _tree(psutil.Process(root)))
    return busy - sum(ours)


def _tree(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


@contextmanager
def probing(folder: Path) -> Iterator[list[Path]]:
    """Probe every processor meanwhile, and watch others; yields the files of the probes' readings.

    There are none where processors cannot be chosen.
    """
    processors = sorted(usable()) if hasattr(os, "sched_setaffinity") else []
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"processor-{processor}.txt" for processor in processors]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    tasks = [(str(processor), str(file)) for processor, file in zip(processors, files, strict=True)]
    tasks += [(OTHERS, str(folder / OTHERS))] if processors else []
    children = [
        subprocess.Popen(command_tied_to_parent("benchmarks.simulator.probe", *task), env=alone) for task in tasks
    ]
    try:
        yield files
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()


def read(folder: Path) -> tuple[list[Readings], Floats]:
    """Read what the probes of each processor noted, and what others took; the last line may be half written."""
    others = _lines([folder / OTHERS]) if (folder / OTHERS).exists() else [np.empty((0, 2))]
    return _lines(sorted(folder.glob("processor-*.txt"))), others[0]


def _lines(files: Sequence[Path]) -> list[Floats]:
    return [np.array([line.split() for line in file.read_text().splitlines()[:-1]], dtype=float) for file in files]


if __name__ == "__main__":
    if sys.argv[1] == OTHERS:
        watch(os.getppid(), Path(sys.argv[2]))
    else:
        probe(int(sys.argv[1]), Path(sys.argv[2]))
