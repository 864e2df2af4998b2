"""Choice of the profile to plan with: the one next to the pipeline if it suits this machine, else one measured here."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from trimtab_pipelines import documents
from trimtab_pipelines.documents import DocumentError, load_profiles, pipeline_folder
from trimtab_pipelines.profile import Hardware, ModelProfile, ModelProfileSpec
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.identity import model_identity, this_machine, usable_cores
from trimtab_profiler.profile import PROFILE_FILE, OnProgress, ProfileOptions, profile, write_profiles

CACHE_VARIABLE = "TRIMTAB_CACHE"
MAX_BUSY_SHARE = 0.25
"""Share of the cores beyond which other processes disturb a measurement; it is repeated once they use half as much."""


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """A profile file, and the reason of its choice."""

    path: Path
    reason: str


def cache_folder() -> Path:
    """Folder of profiles measured on this machine, and of reports."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "trimtab")


def busy_now() -> float:
    """Share of the cores in use, a mean over the last minute."""
    return os.getloadavg()[0] / usable_cores()


def why_unfit(profiles: Mapping[str, ModelProfile], pipeline_file: Path, pipeline: InferencePipeline) -> str:
    """Return why these profiles do not suit pipeline or machine; empty if they do."""
    machine, folder = this_machine(), pipeline_folder(pipeline_file)
    for stage in pipeline.spec.stages:
        profile = profiles.get(stage.name)
        if profile is None:
            return f"it has no profile of stage {stage.name}"
        if profile.spec.pipeline != pipeline.name:
            return f"it is of pipeline {profile.spec.pipeline}"
        if reason := _why_unfit_here(profile.spec, machine):
            return reason
        for variant in stage.variants:
            if not any(point.variant == variant.name for point in profile.spec.points):
                return f"it has no variant {variant.name} of stage {stage.name}"
            identity = profile.spec.models.get(variant.name)
            if identity is not None and (other := identity.describe_change(model_identity(variant, folder))):
                return f"variant {variant.name} of stage {stage.name} was measured with {other}"
    return ""


def _why_unfit_here(profile: ModelProfileSpec, machine: Hardware) -> str:
    hardware, busy_share = profile.hardware, profile.busy_share or 0.0
    if (hardware.processor, hardware.node_cores) != (machine.processor, machine.node_cores):
        return f"it was measured on {hardware.node_cores} × {hardware.processor}"
    if busy_share > MAX_BUSY_SHARE and busy_now() < busy_share / 2:
        return f"it was measured while other processes used {busy_share:.0%} of the cores"
    return ""


def find_profile(
    pipeline_file: Path,
    pipeline: InferencePipeline,
    requested: Path | None,
    on_message: Callable[[str], None] = lambda _: None,
) -> ProfileChoice | None:
    """Find an existing profile that suits pipeline and machine; None if there is none.

    A requested profile is used whatever it was measured on; `on_message` receives a line for each unsuitable one.
    Raises DocumentError if the requested file has no profile of a stage.
    """
    if requested is not None:
        profiles = load_profiles(requested)
        missing = {stage.name for stage in pipeline.spec.stages} - profiles.keys()
        if missing:
            raise DocumentError(f"{requested}: no profile of stage {', '.join(sorted(missing))}")
        if reason := why_unfit(profiles, pipeline_file, pipeline):
            on_message(f"! profile {requested} is used as requested, but {reason}")
        return ProfileChoice(requested, "as requested")
    for path, choice_reason in (
        (pipeline_folder(pipeline_file) / PROFILE_FILE, "measured on an equal machine"),
        (_cache_entry(pipeline_file) / PROFILE_FILE, "measured here earlier"),
    ):
        if path.exists():
            reason = why_unfit(load_profiles(path), pipeline_file, pipeline)
            if not reason:
                return ProfileChoice(path, choice_reason)
            on_message(f"profile {path} is not used: {reason}")
    return None


async def measure_profile(pipeline_file: Path, pipeline: InferencePipeline, on_progress: OnProgress) -> ProfileChoice:
    """Measure a quick profile and cache it; raises ProfileError."""
    profiles = await profile(pipeline, pipeline_folder(pipeline_file), ProfileOptions.quick(pipeline), on_progress)
    shares = [profile.spec.busy_share or 0.0 for profile in profiles.values()]
    beside = f", while other processes used {max(shares):.0%} of the cores" if max(shares) > MAX_BUSY_SHARE else ""
    return ProfileChoice(write_profiles(profiles, _cache_entry(pipeline_file)), f"measured now{beside}")


def _cache_entry(pipeline_file: Path) -> Path:
    """Cache folder of a pipeline's text, the machine, and the versions of trimtab and torch."""
    pipeline_text = documents.pipeline_file(pipeline_file).read_bytes()
    machine = this_machine().model_dump_json().encode()
    versions = "".join(f"{package} {_version(package)}\n" for package in ("trimtab", "torch")).encode()
    return cache_folder() / "profiles" / hashlib.sha256(pipeline_text + machine + versions).hexdigest()[:16]


def _version(package: str) -> str:
    """Version of a package; empty if not installed: with containers of model servers, torch is not needed."""
    try:
        return version_of(package)
    except PackageNotFoundError:
        return ""
