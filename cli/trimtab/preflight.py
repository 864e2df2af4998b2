"""Checks before a run: packages, pipeline, weights and profiles."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.local import profile_cache
from trimtab.options import console
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import require_family
from trimtab_pipelines.documents import DocumentError, load_pipeline, pipeline_folder, write_atomically
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant
from trimtab_profiler.profile import OnProgress
from trimtab_profiler.profile import Progress as Measured


def prepare(pipeline_file: Path) -> InferencePipeline:
    """Load a pipeline to serve here; raises DocumentError if weights are missing, StartError without PyTorch."""
    require_installed()
    pipeline = load_pipeline(pipeline_file)
    folder = pipeline_folder(pipeline_file)
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            _require_servable(variant, f"{pipeline_file}: stage {stage.name}, variant {variant.name}")
            for uri in variant.storage_uris:
                _require_file(uri, folder, f"{pipeline_file}: stage {stage.name}, variant {variant.name}")
    return pipeline


def _require_file(uri: str, folder: Path, where: str) -> None:
    parts = urlsplit(resolve_uri(uri, folder))
    path = Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None
    if path is not None and not path.exists():
        raise DocumentError(f"{where}: storageUri {uri}: {path} does not exist")


def _require_servable(variant: Variant, where: str) -> None:
    """Raise DocumentError if no local model server can serve the variant."""
    if variant.container is not None:
        raise DocumentError(f"{where}: a container only runs in a cluster; give the variant a family to serve it here")
    try:
        require_family(variant.family)
    except ModelError as error:
        raise DocumentError(f"{where}: {error}") from error


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


def choose_profiles(pipeline_file: Path, pipeline: InferencePipeline, requested: Path | None) -> Path:
    """Find the profile to plan with; measure one if there is none for this machine."""
    choice = profile_cache.find_profile(pipeline_file, pipeline, requested, console.print)
    if choice is None:
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

        def show(measured: Measured) -> None:
            m = measured.measurement
            result = f"batch {m.batch_size}: {1000 * m.latency_seconds_p50:.2f} ms, {m.throughput_rps:.0f} rows/s"
            description = f"{measured.stage} {measured.variant} {result}"
            bar.update(task, total=measured.total, completed=measured.done, description=description)

        yield show
