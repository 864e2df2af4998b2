"""Registry of model families. A family's module is imported only when a model needs it.

A plugin family is named by an import path, or by an entry point of an installed package. A runtime of MLServer is named
as in MLServer's settings: package.Class.

A module has `build(spec)`. If its models support several operating points, `KNOBS` lists the fields of an operating
point that they act on, by their names in a document; points that set another field are rejected. A module whose models
accept further tasks has `TAKES_TASKS`.
"""

import inspect
import re
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trimtab_model_servers.errors import ModelError
from trimtab_pipelines.families import HF_FAMILIES
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.spec import InferencePipeline

if TYPE_CHECKING:  # the names alone do not need torch
    from trimtab_model_servers.chat.interfaces import ChatComponents
    from trimtab_model_servers.families.interfaces import Built

_PACKAGE = "trimtab_model_servers.families"
_PLUGIN_GROUP = "trimtab.families"
_IMPORT_PATH = re.compile(r"^(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)[:.](?P<name>[A-Za-z_]\w*)$")
FAMILIES = {
    "echo": "echo",
    "digits/locator": "digits.family",
    "digits/reader": "digits.family",
    "digits-av/early": "digits_av.family",
    "digits-av/late": "digits_av.family",
    "multimodal/vilt": "vilt",
    "multimodal/tvlt": "tvlt",
    "multimodal/tbn": "tbn",
    "multimodal/self-mm": "self_mm",
    "multimodal/av-hubert-base": "av_hubert",
    "multimodal/av-hubert-large": "av_hubert",
    "vision-transformer": "vision_transformer",
    **dict.fromkeys(HF_FAMILIES, "hf.family"),
}
"""Family name to the module of this package that builds it."""
NUMPY_FAMILIES = frozenset({"echo"})
"""Families that compute on NumPy arrays, as runtimes of MLServer do, and import no torch."""

_ROLES = ("colocated", "encode", "text")
"""Encoder and generator, encoder only, generator only."""
_DECODER_ONLY = ("llava-onevision-7b", "internvl3-8b", "smolvlm-2.2b", "smolvlm2-2.2b", "smolvlm2-500m")
CHAT_FAMILIES = {
    **dict.fromkeys((f"lmm-digits/{role}" for role in _ROLES), "lmm_digits.family"),
    **dict.fromkeys((f"{name}/{role}" for name in _DECODER_ONLY for role in _ROLES), "hf_chat.family"),
    "llama-3.2-vision-11b/colocated": "hf_chat.family",
    "hf/text-generation": "hf_chat.family",
    **dict.fromkeys(
        ("hf/image-text-to-text", *(f"hf/image-text-to-text/{role}" for role in _ROLES[1:])), "hf_chat.family"
    ),
}
"""Chat families; their `build(spec)` returns `ChatComponents`."""


def build(spec: ModelSpec) -> "Built":
    """Build a model; ModelError for an unknown family, parameter or knob, or unusable weights."""
    require_family(spec.family)
    module = "mlserver_runtime" if is_runtime(spec.family) else FAMILIES.get(spec.family)
    if module is None:
        family = import_module(f"{_PACKAGE}.user_module").builder_of(spec.family)
    else:
        family = import_module(f"{_PACKAGE}.{module}")
    _require_known(spec, getattr(family, "KNOBS", frozenset()))
    if spec.tasks and not getattr(family, "TAKES_TASKS", False):
        raise ModelError(f"family {spec.family!r} takes no tasks, but the variant has {spec.tasks[0].name!r}")
    construct: Callable[[ModelSpec], Built] = family.build
    return construct(spec)


def build_chat(spec: ModelSpec) -> "ChatComponents":
    """Build the components of a chat model; errors as of `build`."""
    family = import_module(f"{_PACKAGE}.{CHAT_FAMILIES[spec.family]}")
    _require_known(spec, frozenset())
    construct: Callable[[ModelSpec], ChatComponents] = family.build
    return construct(spec)


def require_family(name: str) -> None:
    """Raise ModelError, listing the families or naming the missing package, unless a family exists."""
    if name in FAMILIES or name in CHAT_FAMILIES:
        return
    location = plugin_location(name)
    if location is None:
        known = ", ".join(sorted([*FAMILIES, *CHAT_FAMILIES, *plugin_entry_points()]))
        raise ModelError(f"unknown family {name!r}; give one of your own as package.module:Class; there are: {known}")
    package = location[0].partition(".")[0]
    if find_spec(package) is None:
        raise not_installed(name, package)


def plugin_location(family: str) -> tuple[str, str] | None:
    """Module and attribute of a plugin family; None if the name is neither an import path nor an entry point."""
    if match := _IMPORT_PATH.match(family):
        return match["module"], match["name"]
    point = plugin_entry_points().get(family)
    return (point.module, point.attr) if point else None


@cache
def plugin_entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_PLUGIN_GROUP)}


def load_class(family: str) -> Any:
    """Import the class that a plugin family or a runtime names; raises ModelError."""
    location = plugin_location(family)
    if location is None:
        raise ModelError(f"family {family!r} is not an import path; use package.module:Class")
    module_name, name = location
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise not_installed(family, str(error.name)) from error
        raise ModelError(f"family {family!r}: importing {module_name}: {type(error).__name__}: {error}") from error
    family_class = getattr(module, name, None)
    if family_class is None:
        classes = [n for n, value in vars(module).items() if inspect.isclass(value) and not n.startswith("_")]
        names = ", ".join(sorted(classes)) or "no class"
        raise ModelError(f"family {family!r}: {module_name} has no {name!r}; it has: {names}")
    return family_class


def is_runtime(family: str) -> bool:
    """Whether a family is a runtime of MLServer, which has a dot before its class."""
    return ":" not in family and family not in plugin_entry_points() and _IMPORT_PATH.match(family) is not None


def not_installed(family: str, package: str) -> ModelError:
    return ModelError(
        f"family {family!r}: no module {package!r}; install it in trimtab's environment (pip install), or add its "
        "folder to PYTHONPATH; in a cluster it belongs in the model server's image"
    )


def _require_known(spec: ModelSpec, known: Collection[str]) -> None:
    for point in spec.operating_points:
        for knob, setting in point.knobs.items():
            if knob not in known:
                raise ModelError(
                    f"family {spec.family!r} does not support {knob}, which operating point {point.name!r} sets "
                    f"({setting}); it supports: {', '.join(sorted(known)) or 'none'}"
                )


def modules_to_preload(pipeline: InferencePipeline) -> list[str]:
    """Modules that replicas of a pipeline import, for a fork server to import once; of a plugin, only torch."""
    variants = (variant for stage in pipeline.spec.stages for variant in stage.variants)
    families = {variant.served_family for variant in variants if variant.container is None}
    if not families:
        return []
    runtimes = {family for family in families if is_runtime(family)}
    known = dict.fromkeys(families, "user_module") | FAMILIES | CHAT_FAMILIES
    known |= dict.fromkeys(runtimes, "mlserver_runtime")
    modules = {f"{_PACKAGE}.{known[family]}" for family in families}
    if families - NUMPY_FAMILIES - runtimes:
        modules.add("trimtab_model_servers.server.torch_model")
    if families & CHAT_FAMILIES.keys():
        modules.add("trimtab_model_servers.server.chat_loader")
    return ["trimtab_model_servers.server.replica", *sorted(modules)]
