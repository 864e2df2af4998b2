"""Reads and writes our YAML and JSON files: bounded, safe, with errors that name the file, the field and the cure."""

import json
import os
import tempfile
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from trimtab_pipelines.edge import EdgeSettings
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.pool import Pools
from trimtab_pipelines.profile import ModelProfile, by_stage
from trimtab_pipelines.routing import Endpoints
from trimtab_pipelines.spec import InferencePipeline

MAX_DOCUMENT_BYTES = 16 * 2**20
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class DocumentError(Exception):
    """A file that cannot be used; the message says which field is wrong and what would be right."""


def load_pipeline(path: Path) -> InferencePipeline:
    """Read a pipeline from a YAML file, or from pipeline.yaml in a folder."""
    if path.is_dir():
        path = path / "pipeline.yaml"
    return parse(InferencePipeline, _read_yaml(path), str(path))


def load_profiles(path: Path) -> dict[str, ModelProfile]:
    """Read the profiles of a pipeline's stages: a YAML file of several documents, or a folder holding profile.yaml.

    A stage measured on several kinds of hardware has a document for each.
    """
    if path.is_dir():
        path = path / "profile.yaml"
    documents = _read_yaml_documents(path)
    profiles = [parse(ModelProfile, document, f"{path}, document {n}") for n, document in enumerate(documents, 1)]
    return by_stage(profiles)


def load_plan(path: Path) -> PipelinePlan:
    """Read a plan from JSON or YAML (JSON is YAML too)."""
    return parse(PipelinePlan, _read_json_or_yaml(path), str(path))


def load_endpoints(path: Path) -> Endpoints:
    """Read the replicas of a pipeline."""
    return parse(Endpoints, _read_json_or_yaml(path), str(path))


def load_edge(path: Path | None) -> EdgeSettings:
    """Read the settings of a door; without a file everything is at its default."""
    return EdgeSettings() if path is None else parse(EdgeSettings, _read_json_or_yaml(path), str(path))


def load_pools(path: Path) -> Pools:
    """Read the pools that pipelines share from YAML: `pools: {NAME: {cores: 16, gpus: 1}}`."""
    return parse(Pools, _read_yaml(path), str(path))


def parse(model: type[AnyModel], content: object, where: str) -> AnyModel:
    """Validate parsed YAML or JSON; raise DocumentError listing each wrong field with its path."""
    if not isinstance(content, dict):
        raise DocumentError(f"{where}: expected a mapping with apiVersion, kind, metadata and spec")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise DocumentError(f"{where}: " + "; ".join(_describe(error))) from None


def dump_yaml(*documents: BaseModel) -> str:
    """Write documents as YAML, one after the other."""
    plain = [document.model_dump(mode="json", by_alias=True, exclude_none=True) for document in documents]
    return yaml.dump_all(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes also what only other readers of YAML 1.1, kubectl's among them, take for a boolean."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write a text, in quotes where it would be read as yes or no."""
        quotes = "'" if text in {"y", "Y", "n", "N"} else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_Dumper.add_representer(str, _Dumper.represent_text)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader or a crash never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # others may read it; mkstemp alone would keep it to this user
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, document: BaseModel) -> None:
    """Write a document as JSON in one step."""
    write_atomically(path, document.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise DocumentError(f"{path}: larger than {MAX_DOCUMENT_BYTES // 2**20} MiB; this is no document of ours")
        return path.read_text()
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_yaml_documents(path: Path) -> list[object]:
    try:
        return [document for document in yaml.safe_load_all(_read_text(path)) if document is not None]
    except yaml.YAMLError as error:
        raise DocumentError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _read_yaml(path: Path) -> object:
    documents = _read_yaml_documents(path)
    if len(documents) != 1:
        raise DocumentError(f"{path}: expected one document, found {len(documents)}")
    return documents[0]


def _read_json_or_yaml(path: Path) -> object:
    try:
        content: object = json.loads(_read_text(path))
    except json.JSONDecodeError:
        return _read_yaml(path)
    return content


def _describe(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"]) or "document"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown field; remove it or correct its spelling"
        elif problem["type"] != "value_error" and problem["type"] != "missing":
            message += f" (got {str(problem['input'])[:80]!r})"
        lines.append(f"{field}: {message}")
    return lines
