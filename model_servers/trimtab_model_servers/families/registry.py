"""The families by name, and how each is built. A family's module is imported only when a model asks for it."""

from collections.abc import Callable
from importlib import import_module

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.network import Built
from trimtab_model_servers.settings import ModelSpec

_PACKAGE = "trimtab_model_servers.families"
FAMILIES = {
    "echo": "echo",
    "digits/locator": "digits",
    "digits/reader": "digits",
    **dict.fromkeys((f"torchvision/resnet{depth}" for depth in (18, 34, 50, 101, 152)), "classification"),
}
"""Family name to the module here whose `build(spec)` makes it."""


def build(spec: ModelSpec) -> Built:
    """Build a model with its weights.

    Raises:
        ModelError: no such family, a parameter the family does not know, or weights that cannot be used.
    """
    module = FAMILIES.get(spec.family)
    if module is None:
        raise ModelError(f"unknown family {spec.family!r}; there are: {', '.join(sorted(FAMILIES))}")
    construct: Callable[[ModelSpec], Built] = import_module(f"{_PACKAGE}.{module}").build
    return construct(spec)


def modules_of(families: set[str]) -> list[str]:
    """Name the modules that models of these families import, for whoever wants them imported ahead of time."""
    return sorted({f"{_PACKAGE}.{FAMILIES[family]}" for family in families if family in FAMILIES})
