"""What a profile was measured on, so that nobody plans with the figures of another machine unawares."""

import os
import platform
from pathlib import Path

import psutil

from trimtab_pipelines.profile import Hardware


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Hardware:
    """Name the processor and count the cores this process may use."""
    return Hardware(processor=_processor(cpuinfo), node_cores=usable_cores())


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _processor(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine() or "unknown")
