"""Which profile to plan with: the one beside the pipeline if it is of this machine, else one measured here."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, load_profiles
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.hardware import this_machine
from trimtab_profiler.model_identity import model_identity
from trimtab_profiler.profile import PROFILE_FILE, OnProgress, ProfileOptions, profile, write_profiles

CACHE_VARIABLE = "TRIMTAB_CACHE"


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """The file to plan with, and in a few words why this one."""

    path: Path
    why: str


def cache_folder() -> Path:
    """Where profiles measured here are kept, and the last report of each pipeline."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "trimtab")


def why_unfit(profiles: Mapping[str, ModelProfile], pipeline_file: Path, pipeline: InferencePipeline) -> str:
    """Say why these profiles cannot be trusted here; empty where they can."""
    machine, folder = this_machine(), _folder(pipeline_file)
    for stage in pipeline.spec.stages:
        found = profiles.get(stage.name)
        if found is None:
            return f"it has no profile of stage {stage.name}"
        if found.spec.pipeline != pipeline.name:
            return f"it is of pipeline {found.spec.pipeline}"
        hardware = found.spec.hardware
        if (hardware.processor, hardware.node_cores) != (machine.processor, machine.node_cores):
            return f"it was measured on {hardware.node_cores} × {hardware.processor}"
        for variant in stage.variants:
            if not any(point.variant == variant.name for point in found.spec.points):
                return f"it has no variant {variant.name} of stage {stage.name}"
            subject = found.spec.models.get(variant.name)
            if subject is not None and (other := subject.describe_change(model_identity(variant, folder))):
                return f"variant {variant.name} of stage {stage.name} was measured with {other}"
    return ""


def find_profile(
    pipeline_file: Path, pipeline: InferencePipeline, chosen: Path | None, tell: Callable[[str], None] = lambda _: None
) -> ProfileChoice | None:
    """Find a profile that needs no measuring; None where there is none to be trusted here.

    Args:
        pipeline_file: what is asked for.
        pipeline: the same, read.
        chosen: the file that the user named, used whatever it was measured on.
        tell: called with a line for each profile that is not used, or used though it is of something else.

    Raises:
        DocumentError: the chosen file has no profile of a stage.
    """
    if chosen is not None:
        found = load_profiles(chosen)
        missing = {stage.name for stage in pipeline.spec.stages} - found.keys()
        if missing:
            raise DocumentError(f"{chosen}: no profile of stage {', '.join(sorted(missing))}")
        if reason := why_unfit(found, pipeline_file, pipeline):
            tell(f"! profile {chosen} is used as asked, but {reason}")
        return ProfileChoice(chosen, "as asked")
    for path, why in (
        (_folder(pipeline_file) / PROFILE_FILE, "measured on this kind of machine"),
        (_cached(pipeline_file) / PROFILE_FILE, "measured here before"),
    ):
        if path.exists():
            reason = why_unfit(load_profiles(path), pipeline_file, pipeline)
            if not reason:
                return ProfileChoice(path, why)
            tell(f"profile {path} is not used: {reason}")
    return None


async def measure_profile(pipeline_file: Path, pipeline: InferencePipeline, on_progress: OnProgress) -> ProfileChoice:
    """Measure quickly, and keep what was found for the next time; raises ProfileError."""
    found = await profile(pipeline, _folder(pipeline_file), ProfileOptions.quick(pipeline), on_progress)
    return ProfileChoice(write_profiles(found, _cached(pipeline_file)), "measured here just now")


def _folder(pipeline_file: Path) -> Path:
    path = pipeline_file.resolve()
    return path if path.is_dir() else path.parent


def _cached(pipeline_file: Path) -> Path:
    """Name a folder by the pipeline as written, the machine, and what computes: other versions take other times."""
    path = pipeline_file.resolve()
    written = (path / "pipeline.yaml" if path.is_dir() else path).read_bytes()
    machine = this_machine().model_dump_json().encode()
    versions = "".join(f"{package} {_version(package)}\n" for package in ("trimtab", "torch")).encode()
    return cache_folder() / "profiles" / hashlib.sha256(written + machine + versions).hexdigest()[:16]


def _version(package: str) -> str:
    """Its version, or nothing: who brings containers of model servers need not have torch here."""
    try:
        return version_of(package)
    except PackageNotFoundError:
        return ""
