"""What every run needs before it starts: the pipeline with its weights in place, and profiles to plan with."""

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.local import profile_cache
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.registry import require_family
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant
from trimtab_profiler.profile import Progress as Measured


def prepare(pipeline_file: Path) -> InferencePipeline:
    """Read the pipeline; raise DocumentError where weights kept in files are missing, StartError without PyTorch."""
    require_installed()
    pipeline = load_pipeline(pipeline_file)
    folder = pipeline_file.resolve()
    folder = folder if folder.is_dir() else folder.parent
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            _require_servable(variant, f"{pipeline_file}: stage {stage.name}, variant {variant.name}")
            for address in variant.storage_uris:
                _require_there(address, folder, f"{pipeline_file}: stage {stage.name}, variant {variant.name}")
    return pipeline


def _require_there(address: str, folder: Path, where: str) -> None:
    parts = urlsplit(resolve_uri(address, folder))
    path = Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None
    if path is not None and not path.exists():
        raise DocumentError(f"{where}: storageUri {address}: there is no {path}")


def _require_servable(variant: Variant, where: str) -> None:
    """Raise DocumentError where no model server here can serve it, before any weights are looked for."""
    if variant.container is not None:
        raise DocumentError(f"{where}: a container runs in a cluster alone; give it a family to serve it here")
    try:
        require_family(variant.family)
    except ModelError as error:
        raise DocumentError(f"{where}: {error}") from error


def require_installed(packages: Sequence[str] = ("mlserver", "torch")) -> None:
    """Raise StartError where this installation can plan, but not serve: the command line alone needs no PyTorch."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise StartError(
            f"model servers need {' and '.join(missing)}: pip install '.[all]' in a clone, else 'trimtab[all]'"
        )


def choose_profiles(pipeline_file: Path, pipeline: InferencePipeline, chosen: Path | None, console: Console) -> Path:
    """Find the profile to plan with, measuring where there is none for this machine."""
    choice = profile_cache.find_profile(pipeline_file, pipeline, chosen, console.print)
    if choice is None:
        console.print(f"no profile of {pipeline.name} for this machine yet: measuring, once")
        with profiling_progress(console) as show:
            choice = asyncio.run(profile_cache.measure_profile(pipeline_file, pipeline, show))
    console.print(f"profile {choice.path} ({choice.why})")
    return choice.path


class profiling_progress:  # noqa: N801  (reads as the statement it is)
    """A progress bar for measurements while the block runs."""

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("loading the first models", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, measured: Measured) -> None:
        """Show one more measurement."""
        m = measured.measurement
        took = f"batch {m.batch_size}: {1000 * m.latency_seconds_p50:.2f} ms, {m.throughput_rps:.0f} rows/s"
        words = f"{measured.stage} {measured.variant} {took}"
        self._bar.update(self._task, total=measured.total, completed=measured.done, description=words)
