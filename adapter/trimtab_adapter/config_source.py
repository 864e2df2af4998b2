"""`ConfigSource`: the current pipeline and profiles; an invalid edit keeps the last valid ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from trimtab_pipelines.documents import DocumentError, load_pipeline, load_profiles
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

Stamp = tuple[int, int] | None


class ConfigSource(Protocol):
    """Source of the pipeline and profiles that decisions use."""

    @property
    def pipeline(self) -> InferencePipeline:
        """The pipeline, its budget limited to what is schedulable."""
        ...

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profiles by stage."""
        ...

    @property
    def remark(self) -> str:
        """How the pipeline differs from the user's document, for the explanation; else empty."""
        ...

    def refresh(self) -> str | None:
        """Load changes; return the error, or None."""


class FileConfigSource:
    """A pipeline file and a profile file, read again when they change."""

    remark = ""

    def __init__(self, pipeline: Path, profiles: Path) -> None:
        self._paths = (_file(pipeline, "pipeline.yaml"), _file(profiles, "profile.yaml"))
        self._stamps = tuple(_stamp(path) for path in self._paths)
        self.pipeline: InferencePipeline = load_pipeline(self._paths[0])
        self.profiles: Mapping[str, ModelProfile] = load_profiles(self._paths[1])

    def refresh(self) -> str | None:
        stamps = tuple(_stamp(path) for path in self._paths)
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            pipeline, profiles = load_pipeline(self._paths[0]), load_profiles(self._paths[1])
        except DocumentError as error:
            return f"{error}; the last valid pipeline and profiles stay in use"
        self.pipeline, self.profiles = pipeline, profiles
        return None


def _file(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
