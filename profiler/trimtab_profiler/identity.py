"""Identity of what a profile measures: the machine, and each model's family, parameters and weights."""

import hashlib
import os
import platform
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import psutil

from trimtab_model_servers.families.registry import plugin_location
from trimtab_pipelines.model_spec import is_path, resolve_parameter, resolve_uri
from trimtab_pipelines.profile import Hardware, ModelIdentity
from trimtab_pipelines.variants import ParameterValue, Variant


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> Hardware:
    """Name the processor and the accelerator, if any, and count the cores this process may use."""
    return Hardware(processor=_processor(cpuinfo), accelerator=_accelerator(gpus), node_cores=usable_cores())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


class BusyShare:
    """Share of the usable cores that other processes use, from its creation until it is read.

    Child processes count as this process once they have ended.
    """

    def __init__(self) -> None:
        self._start = _busy_and_own_seconds()

    def read(self) -> float:
        busy, own, wall = (now - start for now, start in zip(_busy_and_own_seconds(), self._start, strict=True))
        return max(0.0, round((busy - own) / max(wall, 1e-3) / usable_cores(), 2))


def _busy_and_own_seconds() -> tuple[float, float, float]:
    """CPU seconds of the usable cores, of this process with its ended children, and wall seconds."""
    cores, own = psutil.cpu_times(percpu=True), os.times()
    usable = [cores[core] for core in os.sched_getaffinity(0)] if hasattr(os, "sched_getaffinity") else cores
    busy = sum(core.user + core.nice + core.system for core in usable)
    return busy, own.user + own.system + own.children_user + own.children_system, own.elapsed


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
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.processor() or platform.machine() or "unknown")


def model_identity(variant: Variant, pipeline_folder: Path) -> ModelIdentity:
    """Describe a variant; relative storage URIs start at the pipeline's folder."""
    parameters = {name: _parameter(value, pipeline_folder) for name, value in variant.parameters.items()}
    weights, code = _weights(variant, pipeline_folder), _code(variant.served_family)
    return ModelIdentity(family=variant.served_family, parameters=parameters, weights=weights, code=code)


def _parameter(value: ParameterValue, pipeline_folder: Path) -> ParameterValue:
    """A parameter, or the digest of the file or folder that it names."""
    path = Path(str(resolve_parameter(value, pipeline_folder)))
    return f"{value} {_digest(path)}" if is_path(value) and path.exists() else value


def _code(family: str) -> str:
    """SHA-256 of the Python files of the package that holds a plugin family; empty for other families."""
    location = plugin_location(family)
    package = find_spec(location[0].partition(".")[0]) if location else None
    if package is None:
        return ""
    path = next(iter(package.submodule_search_locations or (package.origin,)))
    return f"sha256:{_digest(Path(str(path)), '*.py')}"


def _weights(variant: Variant, pipeline_folder: Path) -> str:
    if variant.container is not None:
        started = variant.container
        return started.image or " ".join([*started.command, *started.args] or started.endpoints)
    if variant.digest is not None:
        return variant.digest
    parts = urlsplit(resolve_uri(variant.storage_uri, pipeline_folder))
    path = Path(url2pathname(parts.path))
    if parts.scheme not in {"", "file"} or not path.exists():
        return variant.storage_uri
    return f"sha256:{_digest(path)}"


def _digest(path: Path, pattern: str = "*") -> str:
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    folder_digest = hashlib.sha256()
    for part in sorted(file for file in path.rglob(pattern) if file.is_file()):
        folder_digest.update(f"{part.relative_to(path)} {_digest(part)}\n".encode())
    return folder_digest.hexdigest()
