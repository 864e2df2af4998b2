"""What an object holds, however deep."""

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import nn


def parameters_within(root: object) -> list[nn.Parameter]:
    """Every parameter that an object, what it holds, or what its functions remember can reach, once, in order."""
    found: dict[int, nn.Parameter] = {}
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen[id(one)] = one
        if isinstance(one, nn.Module):
            found |= {id(weights): weights for weights in one.parameters()}
        waiting += _held(one)
    return list(found.values())


def _held(one: Any) -> Iterator[object]:
    if isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    elif isinstance(one, FunctionType):
        yield from (cell.cell_contents for cell in one.__closure__ or ())
    else:
        yield from getattr(one, "__dict__", {}).values()
        yield from (getattr(one, name, None) for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
