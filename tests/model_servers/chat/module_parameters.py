"""Parameters reachable from an object."""

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn


def parameters_within(root: object) -> list[nn.Parameter]:
    """Every parameter reachable from an object by attributes, items and closures, once, in order."""
    parameters: dict[int, nn.Parameter] = {}
    visited: dict[int, object] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop(0)
        if id(value) in visited or isinstance(value, type | ModuleType):
            continue
        visited[id(value)] = value
        if isinstance(value, nn.Module):
            parameters |= {id(weights): weights for weights in value.parameters()}
        waiting += _children(value)
    return list(parameters.values())


def _children(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or ())
    else:
        yield from getattr(value, "__dict__", {}).values()
        yield from (
            getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
        )
