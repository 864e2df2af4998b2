"""Reading and writing of YAML and JSON documents, with errors that name the file and the field."""

import copy
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.flavors import ResourceFlavor, ResourceFlavors, merge_flavors
from trimtab_pipelines.plan import PipelinePlan, budget_capacity, idle_stages, plan_capacity
from trimtab_pipelines.profile import ModelProfile, profiles_by_stage
from trimtab_pipelines.quantity import AS_WRITTEN, MAX_NUMBER
from trimtab_pipelines.replica_groups import group_of
from trimtab_pipelines.spec import InferencePipeline, Pools

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 16 * 2**20
MAX_DEPTH = 64
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
AnyModel = TypeVar("AnyModel", bound=BaseModel)


class DocumentError(UserError):
    """An invalid file; the message names the field and what is expected."""


def pipeline_file(path: Path) -> Path:
    return path / "pipeline.yaml" if path.is_dir() else path


def pipeline_folder(path: Path) -> Path:
    """Folder of a pipeline, the base of relative storage URIs, as an absolute path."""
    return pipeline_file(path).resolve().parent


def load_pipeline(path: Path) -> InferencePipeline:
    """Read a pipeline from a YAML file, or from pipeline.yaml in a folder."""
    path = pipeline_file(path)
    return parse(InferencePipeline, _read_yaml(path), str(path))


def parse_flavors(written: str) -> tuple[ResourceFlavor, ...]:
    """Parse the resource flavors of a cluster from a JSON list."""
    return parse(ResourceFlavors, {"flavors": json.loads(written)}, "resource flavors").flavors


def parse_pipeline(content: object, where: str, flavors: Sequence[ResourceFlavor] = ()) -> InferencePipeline:
    """Parse a pipeline with the resource flavors of its cluster; DocumentError if a variant names an unknown one."""
    pipeline = parse(InferencePipeline, content, where)
    spec = pipeline.spec.replace(flavors=merge_flavors(pipeline.spec.flavors, flavors))
    for stage in spec.stages:
        for variant in stage.variants:
            try:
                spec.flavor(variant)
            except UserError as error:
                raise DocumentError(f"{where}: spec.stages.{stage.name}: {error}") from None
    return pipeline.replace(spec=spec) if flavors else pipeline


def load_profiles(path: Path) -> dict[str, ModelProfile]:
    """Read the profiles of a pipeline's stages from a YAML file of several documents, or from profile.yaml in a folder.

    A stage measured on several kinds of hardware has one document for each.
    """
    if path.is_dir():
        path = path / "profile.yaml"
    documents = _read_yaml_documents(path)
    profiles = [parse(ModelProfile, document, f"{path}, document {n}") for n, document in enumerate(documents, 1)]
    return profiles_by_stage(profiles)


def load_plan(path: Path) -> PipelinePlan:
    return parse(PipelinePlan, _read_json_or_yaml(path), str(path))


def load_published_plan(path: Path) -> PipelinePlan:
    """Read a plan of an adapter that may be newer than this version; see `parse_plan`."""
    return parse_plan(_read_json_or_yaml(path), str(path))


def parse_plan(content: object, where: str) -> PipelinePlan:
    """Parse a plan, ignoring and logging fields that only a newer version knows.

    Components are upgraded one after the other, and a plan with an unknown field is better than none.
    """
    _require_plain(content, where)
    unknown: list[tuple[int | str, ...]] = []
    with suppress(Exception):  # `parse` names the error
        try:
            return PipelinePlan.model_validate(content, by_alias=True, by_name=False)
        except ValidationError as error:
            unknown = [found["loc"] for found in error.errors(include_url=False) if found["type"] == "extra_forbidden"]
    supported = copy.deepcopy(content)
    for path in unknown:
        _remove_field(supported, path)
    plan = parse(PipelinePlan, supported, where)
    _log_unknown_fields(", ".join(sorted({".".join(map(str, path)) for path in unknown})))
    return plan


def validate_plan(plan: PipelinePlan, pipeline: InferencePipeline) -> PipelinePlan:
    """Return the plan if it fits the pipeline; DocumentError names the field that does not."""
    if plan.spec.pipeline != pipeline.name:
        raise DocumentError(f"spec.pipeline: the plan is for {plan.spec.pipeline!r}, not for {pipeline.name!r}")
    for stage in pipeline.spec.stages:
        try:
            planned = plan.spec.stage(stage.name)
            for variant, point in (point.key(planned.variant) for point in planned.points):
                stage.variant(variant).point(point)
            groups = [group_of(stage, group.variant).name for group in planned.groups]
        except KeyError as error:
            raise DocumentError(f"spec.stages: {error.args[0]}") from error
        if len(set(groups)) < len(groups):
            raise DocumentError(f"spec.stages: {stage.name} has two otherGroups of variants that one replica hosts")
    idle = idle_stages(plan, pipeline.spec)
    for stage in pipeline.spec.stages:
        if not plan.spec.stage(stage.name).replicas and stage.name not in idle:
            raise DocumentError(f"spec.stages: {stage.name} has 0 replicas, but another stage reads its outputs")
    return plan


def accept_plan(plan: PipelinePlan, pipeline: InferencePipeline) -> PipelinePlan:
    """Return the plan if it fits the pipeline and its budget; DocumentError names what does not."""
    validate_plan(plan, pipeline)
    budget = budget_capacity(pipeline.spec)
    try:
        requested = plan_capacity(plan, pipeline.spec)
    except OverflowError as error:
        raise DocumentError("spec.stages: the plan requests more cores than a number can hold") from error
    if not budget.fits(requested):
        raise DocumentError(
            f"spec.stages: the plan requests {requested.cores:g} cores and {requested.gpus} GPUs, "
            f"but the budget is {budget.cores:g} cores and {budget.gpus} GPUs"
            + "".join(f", at most {most:g} of flavor {name}" for name, most in budget.flavors.items())
        )
    return plan


@cache  # logged once: every plan has the same fields
def _log_unknown_fields(fields: str) -> None:
    log.warning("ignoring plan fields that this version does not know: %s; upgrade it", fields)


def _remove_field(content: Any, path: tuple[int | str, ...]) -> None:
    for step in path[:-1]:
        content = content[step]
    del content[path[-1]]


def load_endpoints(path: Path) -> Endpoints:
    return parse(Endpoints, _read_json_or_yaml(path), str(path))


def load_edge(path: Path | None) -> EdgeSettings:
    """Read the proxy settings; without a file all settings have their defaults."""
    return EdgeSettings() if path is None else parse(EdgeSettings, _read_json_or_yaml(path), str(path))


def load_pools(path: Path) -> Pools:
    """Read pools from YAML: `pools: {NAME: {cores: 16, gpus: 1}}`."""
    return parse(Pools, _read_yaml(path), str(path))


def parse(model: type[AnyModel], content: object, where: str) -> AnyModel:
    """Validate parsed YAML or JSON; DocumentError lists each invalid field with its path."""
    if not isinstance(content, dict):
        raise DocumentError(f"{where}: expected a mapping with apiVersion, kind, metadata and spec")
    _require_plain(content, where)
    try:
        return model.model_validate(content, context=AS_WRITTEN, by_alias=True, by_name=False)
    except ValidationError as error:
        raise DocumentError(f"{where}: " + "; ".join(_describe(error))) from None
    except Exception as error:  # a defect of a validator, which one tenant's document must not turn into an outage
        log.exception("%s: validation failed", where)
        raise DocumentError(f"{where}: cannot be validated: {type(error).__name__}: {error}") from error


def _require_plain(content: object, where: str) -> None:
    """Raise DocumentError for a value outside the status that is too deep, no Unicode or an unbounded number."""
    written = {key: part for key, part in content.items() if key != "status"} if isinstance(content, dict) else content
    pending: list[tuple[object, tuple[object, ...]]] = [(written, ())]
    containers: set[int] = set()
    while pending:
        value, path = pending.pop()
        problem = ""
        if isinstance(value, dict | list) and id(value) not in containers:
            containers.add(id(value))  # YAML's aliases repeat a container, possibly within itself
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            pending += ((part, (*path, key)) for key, part in parts)
            pending += ((key, path) for key in value if isinstance(value, dict))
        if len(path) > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            problem = f"the number must be finite and at most {MAX_NUMBER}"
        elif isinstance(value, str) and _NO_TEXT.search(value):
            problem = "the text contains a null character or half of a surrogate pair"
        if problem:
            field = ascii(".".join(map(str, path[:8])))[1:-1]
            raise DocumentError(f"{where}: {field or 'document'}: {problem}")


def dump_yaml(*documents: BaseModel) -> str:
    plain = [document.model_dump(mode="json", by_alias=True, exclude_none=True) for document in documents]
    return yaml.dump_all(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys, which the safe loader accepts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Read a mapping; ConstructorError names the key and line of a duplicate."""
        marks: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and marks.setdefault(key.value, key.start_mark) is not key.start_mark:
                message = f"duplicate key {key.value!r}, first on line {marks[key.value].line + 1}"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
        return super().construct_mapping(node, deep=deep)


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {duplicate!r}")
    return mapping


class _Dumper(yaml.SafeDumper):
    """YAML dumper that also quotes strings that YAML 1.1 readers such as kubectl take for booleans."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        quotes = "'" if text in {"y", "Y", "n", "N"} else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_Dumper.add_representer(str, _Dumper.represent_text)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that no reader sees part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(temporary).chmod(0o644)  # mkstemp makes files readable by their owner only
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, document: BaseModel) -> None:
    write_atomically(path, document.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise DocumentError(f"{path}: larger than {MAX_DOCUMENT_BYTES // 2**20} MiB")
        return path.read_text()
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_yaml_documents(path: Path) -> list[object]:
    try:
        return [document for document in yaml.load_all(_read_text(path), _Loader) if document is not None]
    except yaml.YAMLError as error:
        raise DocumentError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _read_yaml(path: Path) -> object:
    documents = _read_yaml_documents(path)
    if len(documents) != 1:
        raise DocumentError(f"{path}: expected one document, found {len(documents)}")
    return documents[0]


def _read_json_or_yaml(path: Path) -> object:
    try:
        content: object = json.loads(_read_text(path), object_pairs_hook=_unique_object)
    except json.JSONDecodeError:
        return _read_yaml(path)
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from error
    return content


def _describe(error: ValidationError) -> list[str]:
    lines = []
    problems = error.errors(include_url=False)
    inner = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    for problem in problems:
        if problem["type"] == "too_short" and problem["loc"] in inner:
            continue  # the list is short only because one of its items is invalid
        field = ".".join(str(part) for part in problem["loc"]) or "document"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])
            right = "remove it or correct its spelling" if (camel := to_camel(name)) == name else f"write {camel}"
            message = f"unknown field; {right}"
        elif problem["type"] != "value_error" and problem["type"] != "missing":
            message += f" (got {str(problem['input'])[:80]!r})"
        lines.append(f"{field}: {message}")
    return lines
