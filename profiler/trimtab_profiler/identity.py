"""Identity of what a profile measures: the machine, and each model's family, parameters and weights."""

import hashlib
import os
import platform
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import psutil

from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.profile import Hardware, ModelIdentity
from trimtab_pipelines.variants import Variant


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/proc/driver/nvidia/gpus")) -> Hardware:
    """Name the processor and the accelerator, if any, and count the cores this process may use."""
    return Hardware(processor=_processor(cpuinfo), accelerator=_accelerator(gpus), node_cores=usable_cores())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


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
    weights = _weights(variant, pipeline_folder)
    return ModelIdentity(family=variant.family, parameters=variant.parameters, weights=weights)


def _weights(variant: Variant, pipeline_folder: Path) -> str:
    if variant.container is not None:
        return variant.container.image
    if variant.digest is not None:
        return variant.digest
    parts = urlsplit(resolve_uri(variant.storage_uri, pipeline_folder))
    path = Path(url2pathname(parts.path))
    if parts.scheme not in {"", "file"} or not path.exists():
        return variant.storage_uri
    return f"sha256:{_digest(path)}"


def _digest(path: Path) -> str:
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    folder_digest = hashlib.sha256()
    for part in sorted(file for file in path.rglob("*") if file.is_file()):
        folder_digest.update(f"{part.relative_to(path)} {_digest(part)}\n".encode())
    return folder_digest.hexdigest()
