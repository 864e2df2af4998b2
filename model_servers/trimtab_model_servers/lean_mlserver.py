"""MLServer, imported without the packages that replicas do not use. Import it before any other module of MLServer."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HIDDEN = frozenset({"aiokafka", "opentelemetry", "pandas"})
"""Packages of MLServer's data frames, Kafka and tracing, which replicas do not use: 35 MiB, and 1.3 s of imports."""


class _Placeholder(ModuleType):
    """A module whose every attribute is a class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Placeholders(MetaPathFinder, Loader):
    """Finds placeholders for the hidden packages and their modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _HIDDEN else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Placeholder(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def _lean_imports() -> Iterator[None]:
    """Import placeholders instead of the hidden packages; later imports find the packages themselves."""
    finder, before = _Placeholders(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name not in before and name.partition(".")[0] in _HIDDEN]:
            del sys.modules[name]


with _lean_imports():
    import mlserver as mlserver  # noqa: PLC0414  (imported from here)
