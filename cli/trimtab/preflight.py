"""Checks before a run: packages, pipeline, weights and profiles."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import ValidationError
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.local import profile_cache
from trimtab.options import console
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import require_family
from trimtab_model_servers.weights.files import require_digest
from trimtab_model_servers.weights.hf_hub import require_reachable
from trimtab_pipelines.documents import DocumentError, load_pipeline, pipeline_folder, write_atomically
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.model_spec import is_path, resolve_uri
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_profiler.engine_replica import with_container_endpoints
from trimtab_profiler.identity import model_identity
from trimtab_profiler.profile import OnProgress
from trimtab_profiler.profile import Progress as Measured

PLAIN_PROGRESS_SECONDS = 5.0
"""Interval of lines about a profiling in a log."""


def prepare(pipeline_file: Path, engine: str | None = None) -> InferencePipeline:
    """Load a pipeline to serve here, its containers at the address `engine` if one is given.

    Raises DocumentError if weights are missing, StartError without PyTorch.
    """
    pipeline = load_pipeline(pipeline_file)
    if engine is not None:
        pipeline = with_endpoint(pipeline, engine)
    if any(variant.container is None for stage in pipeline.spec.stages for variant in stage.variants):
        require_installed()
    require_servable(pipeline_file, pipeline)
    return pipeline


def with_endpoint(pipeline: InferencePipeline, url: str) -> InferencePipeline:
    """A pipeline whose containers are at an address; raises UserError if it has none, or more than one."""
    containers = sum(variant.container is not None for stage in pipeline.spec.stages for variant in stage.variants)
    if containers != 1:
        raise UserError(f"--engine {url}: the pipeline has {containers} containers; one is required")
    try:
        return with_container_endpoints(pipeline, url.rstrip("/"))
    except ValidationError as error:
        raise UserError(f"--engine {url}: {error.errors()[0]['msg']}") from error


def require_servable(pipeline_file: Path, pipeline: InferencePipeline) -> None:
    """Raise DocumentError for a variant that no local model server can serve, and for missing or other weights."""
    folder = pipeline_folder(pipeline_file)
    _require_requirements(folder / "requirements.txt")
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            where = f"{pipeline_file}: stage {stage.name}, variant {variant.name}"
            if variant.container is not None:
                if not (variant.container.command or variant.container.endpoints):
                    message = "an image only runs in a cluster; give container.command or endpoints to serve it here"
                    raise DocumentError(f"{where}: {message}")
                continue
            try:
                require_family(variant.served_family)
                for uri in variant.storage_uris:
                    _require_file(uri, folder)
                weights = local_path(variant.storage_uri, folder)
                if weights is not None and weights.is_file():
                    require_digest(weights, variant.digest, f"storageUri {variant.storage_uri}")
            except ModelError as error:
                raise DocumentError(f"{where}: {error}") from error


def _require_requirements(path: Path) -> None:
    """Raise DocumentError for a package in a pipeline's requirements.txt that is not installed in a listed version."""
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in (line.partition(" #")[0].strip() for line in lines):
        if not line or line.startswith(("#", "-")):
            continue
        try:
            requirement = Requirement(line)
            installed = version(requirement.name)
        except InvalidRequirement as error:
            raise DocumentError(f"{path}: {line}: {str(error).splitlines()[0]}") from error
        except PackageNotFoundError:
            installed = ""
        applies = requirement.marker is None or requirement.marker.evaluate()
        if applies and not (installed and requirement.specifier.contains(installed, prereleases=True)):
            problem = f"not {installed}, which is installed" if installed else "which is not installed"
            raise DocumentError(f"{path} requires {line}, {problem}; run: {sys.executable} -m pip install -r {path}")


def _require_file(uri: str, folder: Path) -> None:
    path = local_path(uri, folder)
    if path is not None and not path.exists():
        raise ModelError(f"storageUri {uri}: {path} does not exist")
    if uri.startswith("hf://"):
        require_reachable(uri.removeprefix("hf://"))


def local_path(uri: str, folder: Path) -> Path | None:
    parts = urlsplit(resolve_uri(uri, folder))
    return Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None


def remarks(pipeline_file: Path, pipeline: InferencePipeline) -> Iterator[str]:
    """What is valid in a pipeline, but probably not what its author expects."""
    folder = pipeline_folder(pipeline_file)
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            for remark in (*_size_remarks(stage, variant, folder), *_evidence_remarks(variant, folder)):
                yield f"! stage {stage.name}, variant {variant.name}: {remark}"


def _size_remarks(stage: Stage, variant: Variant, folder: Path) -> Iterator[str]:
    unused = [size for size in stage.batch_sizes if size > variant.max_batch_size]
    if unused and "batch_sizes" in stage.model_fields_set:
        sizes = ", ".join(map(str, unused))
        yield f"batchSizes {sizes} are above maxBatchSize {variant.max_batch_size} and are not used"
    weights, memory = local_path(variant.storage_uri, folder), variant.resources.memory
    if weights is not None and weights.is_file() and weights.stat().st_size > memory:
        size = weights.stat().st_size / 2**20
        yield f"its weights of {size:.0f} MiB do not fit into resources.memory, {memory / 2**20:.0f} MiB"


def _evidence_remarks(variant: Variant, folder: Path) -> Iterator[str]:
    for name, value in variant.parameters.items():
        if isinstance(value, str) and "/" in value and not is_path(value) and (folder / value).exists():
            yield f"parameters.{name} {value} is passed as it is; write ./{value} for a path relative to the pipeline"
    digests = {point.measured_accuracy().model_digest for point in variant.points} - {None}
    if digests and digests != {model_identity(variant, folder).digest}:
        yield "its accuracy was measured with other weights, parameters or code; run trimtab evaluate again"


def require_free_ports(**ports: int) -> None:
    """Raise UserError for a port, by its option, that another process listens on; 0 is any free port."""
    for option, port in ports.items():
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            message = f"--{option.replace('_', '-')} {port}: {reason}; give another port, or 0 for a free one"
            raise UserError(message) from error


def write_edited(path: Path, text: str) -> None:
    """Write an edited pipeline; raises DocumentError if it cannot be read."""
    write_atomically(path, text)
    load_pipeline(path)
    console.print(f"pipeline written to {path}")


def require_installed(packages: Sequence[str] = ("mlserver", "torch")) -> None:
    """Raise StartError if packages are missing that serving needs and planning does not."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise StartError(
            f"model servers need {' and '.join(missing)}: pip install '.[all]' in a clone, else 'trimtab[all]'"
        )


def choose_profiles(
    pipeline_file: Path, pipeline: InferencePipeline, requested: Path | None, *, prepared: bool = True
) -> Path:
    """Find the profile to plan with; measure one if there is none for this machine, of a pipeline that is prepared."""
    for remark in remarks(pipeline_file, pipeline):
        console.print(remark)
    choice = profile_cache.find_profile(pipeline_file, pipeline, requested, console.print)
    if choice is None:
        if not prepared:
            prepare(pipeline_file)
        console.print(f"no profile of {pipeline.name} for this machine: measuring one")
        with profiling_progress() as show:
            choice = asyncio.run(profile_cache.measure_profile(pipeline_file, pipeline, show))
    console.print(f"profile {choice.path} ({choice.reason})")
    return choice.path


def counting_progress() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
    return Progress(*columns, console=console)


@contextmanager
def profiling_progress() -> Iterator[OnProgress]:
    """Show the progress of a profiling while the block runs."""
    with counting_progress() as bar:
        task = bar.add_task("loading the first models", total=None)
        printed = [time.monotonic()]

        def show(measured: Measured) -> None:
            m = measured.measurement
            result = f"batch {m.batch_size}: {1000 * m.latency_seconds_p50:.2f} ms with threads: {measured.threads}"
            description = f"{measured.stage} {measured.variant} {result}"
            bar.update(task, total=measured.total, completed=measured.done, description=description)
            if not console.is_terminal and time.monotonic() - printed[0] > PLAIN_PROGRESS_SECONDS:
                printed[0] = time.monotonic()
                console.print(f"{measured.done}/{measured.total} measurements: {description}")

        yield show
