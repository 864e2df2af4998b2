"""Families that are not ours: where an import path, or the entry point of an installed package, leads to."""

import inspect
import re
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from trimtab_model_servers.errors import ModelError

GROUP = "trimtab.families"
_PATH = re.compile(r"^(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)$")


def plugin_location(family: str) -> tuple[str, str] | None:
    """Module and name of a family from outside; None where it is neither an import path nor an entry point."""
    if match := _PATH.match(family):
        return match["module"], match["name"]
    point = _entry_points().get(family)
    return (point.module, point.attr) if point else None


def entry_point_names() -> list[str]:
    """The families that installed packages offer."""
    return sorted(_entry_points())


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def require_importable(family: str) -> None:
    """Check, without importing it, that the module of a family from outside is there.

    Raises:
        ModelError: it is not; the message says how it gets there.
    """
    place = plugin_location(family)
    if place is None:
        return
    package = place[0].partition(".")[0]
    if find_spec(package) is None:
        raise ModelError(_not_there(family, package))


def _not_there(family: str, package: str) -> str:
    return (
        f"family {family!r}: no module {package!r} here; install it beside trimtab (pip install), or name the folder "
        "it is in in PYTHONPATH; in a cluster it belongs into the model server's image"
    )


def load_class(family: str) -> Any:
    """Import what a family names: an object with `build`, or a class of torch.nn.Module.

    Raises:
        ModelError: naming the module, and what went wrong in it.
    """
    place = plugin_location(family)
    if place is None:
        raise ModelError(f"family {family!r} is no import path; write package.module:Class")
    module_name, name = place
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise ModelError(_not_there(family, str(error.name))) from error
        raise ModelError(f"family {family!r}: importing {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if found is None:
        classes = [n for n, value in vars(module).items() if inspect.isclass(value) and not n.startswith("_")]
        known = ", ".join(sorted(classes)) or "no class"
        raise ModelError(f"family {family!r}: {module_name} has no {name!r}; it has: {known}")
    return found
