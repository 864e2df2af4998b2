"""Plugin families, named by an import path or by an entry point of an installed package."""

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
    """Module and attribute of a plugin family; None if the name is neither an import path nor an entry point."""
    if match := _PATH.match(family):
        return match["module"], match["name"]
    point = plugin_entry_points().get(family)
    return (point.module, point.attr) if point else None


def entry_point_names() -> list[str]:
    """Families of installed packages."""
    return sorted(plugin_entry_points())


@cache
def plugin_entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def require_importable(family: str) -> None:
    """Check that the package of a plugin family is installed, without importing it.

    Raises:
        ModelError: it is not.
    """
    location = plugin_location(family)
    if location is None:
        return
    package = location[0].partition(".")[0]
    if find_spec(package) is None:
        raise ModelError(_not_installed(family, package))


def _not_installed(family: str, package: str) -> str:
    return (
        f"family {family!r}: no module {package!r}; install it in trimtab's environment (pip install), or add its "
        "folder to PYTHONPATH; in a cluster it belongs in the model server's image"
    )


def load_class(family: str) -> Any:
    """Import a plugin family: an object with `build`, or a subclass of torch.nn.Module.

    Raises:
        ModelError: the import failed.
    """
    location = plugin_location(family)
    if location is None:
        raise ModelError(f"family {family!r} is not an import path; use package.module:Class")
    module_name, name = location
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            raise ModelError(_not_installed(family, str(error.name))) from error
        raise ModelError(f"family {family!r}: importing {module_name}: {type(error).__name__}: {error}") from error
    family_class = getattr(module, name, None)
    if family_class is None:
        classes = [n for n, value in vars(module).items() if inspect.isclass(value) and not n.startswith("_")]
        names = ", ".join(sorted(classes)) or "no class"
        raise ModelError(f"family {family!r}: {module_name} has no {name!r}; it has: {names}")
    return family_class
