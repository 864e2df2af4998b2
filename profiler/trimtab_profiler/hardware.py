"""Hardware of this machine, recorded in profiles."""

import os
import platform
from pathlib import Path

import psutil

from trimtab_pipelines.profile import Hardware


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> Hardware:
    """Name the processor and the accelerator, if any, and count the cores this process may use."""
    return Hardware(processor=_processor(cpuinfo), accelerator=_accelerator(gpus), node_cores=usable_cores())


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def _accelerator(gpus: Path) -> str | None:
    """Model of the first GPU, as the driver reports it."""
    for file in sorted(gpus.glob("*/information")):
        models = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model:")]
        if models:
            return models[0]
    return None


def _processor(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine() or "unknown")
